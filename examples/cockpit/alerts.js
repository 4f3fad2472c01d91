/** Sentences at the top of the page, of what goes wrong beside any dialog. */
import { html, say } from "./dom.js";
import { kept } from "./kept.js";

const sentences = new Map();
let update = null;

function make(item) {
    const text = html("p");
    const close = html(
        "button",
        { type: "button", class: "plain", "aria-label": "Close this message", click: () => clear(item.key) },
        "×");
    return {
        element: html("div", { class: "alert danger" }, text, close),
        show: ({ sentence }) => say(text, sentence),
    };
}

function show() {
    update ??= kept(document.getElementById("alerts"), make);
    update([...sentences].map(([key, sentence]) => ({ key, sentence })));
}

/** Shows a sentence about something, in place of the one before about the same. */
export function tell(about, sentence) {
    sentences.set(about, sentence);
    show();
}

/** Takes away what was said about something. */
export function clear(about) {
    if (sentences.delete(about))
        show();
}
