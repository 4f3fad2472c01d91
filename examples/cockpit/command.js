/** The `virtlun` command, whose answers are JSON. */
import { Lines } from "./lines.js";

function spawn(words) {
    return cockpit.spawn(["virtlun", ...words, "--json"], { superuser: "try", err: "message" });
}

/** Returns why a command failed, in the sentence that it said itself if it did. */
function sentence({ problem, message }) {
    if (problem === "not-found")
        return "The command virtlun is not in the PATH of Cockpit's sessions: link it into /usr/local/bin.";
    const said = (message ?? "").trim().split("\n").pop();
    return said.replace(/^Error: /, "") || problem || "The command virtlun failed.";
}

/** Runs one; resolves to what it printed, also where its status is 1. Fails with one sentence. */
export function run(...words) {
    return new Promise((resolve, reject) => {
        const done = (failure, printed) => {
            try {
                resolve(JSON.parse(printed));
            } catch {
                reject(new Error(failure ? sentence(failure) : `virtlun ${words.join(" ")} printed no JSON.`));
            }
        };
        spawn(words).then(printed => done(null, printed), done);
    });
}

/** Runs one that prints a line of JSON again and again; `ended` is called with a sentence, or null.
 *
 * Returns what ends it.
 */
export function follow(words, told, ended) {
    const lines = new Lines();
    const process = spawn(words);
    process.stream(piece => lines.take(piece).forEach(line => told(JSON.parse(line))));
    process.then(() => ended(null), failure => ended(sentence(failure)));
    return () => process.close("terminated");
}
