/** The `virtlun` command, whose answers are JSON. */
import { Lines } from "./lines.js";

/** Milliseconds until one has to have ended: more than a target is waited for. */
const DEADLINE_MS = 120000;

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
        const command = `virtlun ${words.join(" ")}`;
        const process = spawn(words);
        const timer = setTimeout(() => {
            reject(new Error(`${command} has not ended for ${DEADLINE_MS / 1000} s.`));
            process.close("terminated");
        }, DEADLINE_MS);
        const done = (failure, printed) => {
            clearTimeout(timer);
            try {
                resolve(JSON.parse(printed));
            } catch {
                reject(new Error(failure ? sentence(failure) : `${command} printed no JSON.`));
            }
        };
        process.then(printed => done(null, printed), done);
    });
}

/** Runs one that prints a line of JSON again and again; `ended` is called with a sentence, or null.
 *
 * A line that is no JSON ends it, and what `told` throws. Returns what ends it.
 */
export function follow(words, told, ended) {
    const lines = new Lines();
    const process = spawn(words);
    let wrong = null;
    process.stream(piece => {
        try {
            lines.take(piece).forEach(line => told(JSON.parse(line)));
        } catch (error) {
            wrong ??= `What the command virtlun ${words.join(" ")} printed cannot be shown: ${error.message}`;
            process.close("terminated");
        }
    });
    process.then(() => ended(wrong), failure => ended(wrong ?? sentence(failure)));
    return () => process.close("terminated");
}
