/** A small chart of numbers that come one after the other, drawn by hand. */
import { POINTS } from "./activity.js";
import { html, say, svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 48;

/** Returns the path of a line; a number that is null is a gap in it. */
function pathOf(values, highest) {
    const first = POINTS - values.length;
    const steps = values.map((value, index) => {
        if (value === null)
            return "";
        const x = (first + index) * WIDTH / (POINTS - 1);
        const y = HEIGHT - 1 - value / highest * (HEIGHT - 2);
        const goesOn = index > 0 && values[index - 1] !== null;
        // One that stands alone is a dot.
        return `${goesOn ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${goesOn ? "" : "h0.1"}`;
    });
    return steps.join("");
}

/** Makes one of several lines, which have a name each; `text` is what a number is for people. */
export function chart(title, names, text) {
    const paths = names.map((_name, index) => svg("path", { class: `line line${index}` }));
    const picture = svg(
        "svg",
        { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
        ...paths);
    const numbers = names.map((_name, index) => html("span", { class: `number number${index}` }));
    const most = html("span", {});
    const element = html(
        "figure",
        { class: "chart" },
        html("figcaption", {}, html("span", { class: "caption" }, title), ...numbers),
        picture,
        html("div", { class: "axis quiet" }, html("span", {}, "2 minutes"), most));
    const show = lists => {
        const highest = Math.max(...lists.flat().filter(value => value !== null), 0);
        const now = lists.map((list, index) => {
            const value = list[list.length - 1] ?? null;
            return `${names[index]} ${value === null ? "–" : text(value)}`.trim();
        });
        lists.forEach((list, index) => paths[index].setAttribute("d", pathOf(list, highest || 1)));
        numbers.forEach((number, index) => say(number, now[index]));
        say(most, highest ? `at most ${text(highest)}` : "");
        picture.setAttribute("aria-label", [`${title}: ${now.join(", ")}`, most.textContent].filter(Boolean).join("; "));
    };
    return { element, show };
}
