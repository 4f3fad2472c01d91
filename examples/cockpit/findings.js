/** The part of the page with what `virtlun doctor` finds on this host. */
import { run } from "./command.js";
import { html, say } from "./dom.js";

const ORDER = ["failed", "warning", "ok"];
const STYLES = { failed: "danger", warning: "warning", ok: "success" };

function itemOf({ what, state, found, advice }) {
    return html(
        "li",
        { class: `alert ${STYLES[state] ?? "warning"}` },
        html("p", {}, html("strong", {}, `${what}: `), found),
        advice ? html("p", { class: "quiet" }, advice) : null);
}

function listOf(findings) {
    return html("ul", {}, ...findings.map(itemOf));
}

/** How often was asked: the last alone is shown, whichever answer comes first. */
let asked = 0;

/** Shows them in the element, and how many they are in `count`; resolves when it has. */
export async function findings(element, count, button, target) {
    const own = ++asked;
    button.disabled = true;
    element.setAttribute("aria-busy", "true");
    try {
        const found = await run(...target.words, "doctor");
        if (own !== asked)
            return;
        const counts = ORDER.map(state => `${found.filter(each => each.state === state).length} ${state}`);
        const good = found.filter(each => each.state === "ok");
        const others = found.filter(each => each.state !== "ok");
        others.sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state));
        say(count, counts.join(", "));
        element.replaceChildren(
            listOf(others),
            html("details", {}, html("summary", {}, `What is ok (${good.length})`), listOf(good)));
    } catch (error) {
        if (own !== asked)
            return;
        say(count, "");
        element.replaceChildren(html("p", { class: "alert danger", role: "alert" }, error.message));
    }
    element.removeAttribute("aria-busy");
    button.disabled = false;
}
