/** The part of the page with the stores, their fill and their volumes. */
import { html, say } from "./dom.js";
import { kept } from "./kept.js";
import { shown } from "./sizes.js";
import { volumeRow } from "./volumerow.js";

/** Rows of one store that are shown; of more there is a filter. */
const ROWS_MAX = 200;

/** Percent from which on a store looks full. */
const WARN = 80;
const DANGER = 95;

const COLUMNS = ["Volume", "Size", "Takes", "Kind", "Used by", "Actions"];

function meterOf(name) {
    const bar = html("div", { class: "meter-bar" });
    const text = html("span", {});
    const meter = html(
        "div",
        { class: "meter", role: "meter", "aria-label": `Fill of ${name}`, "aria-valuemin": 0, "aria-valuemax": 100 },
        bar);
    const show = ({ size, free }) => {
        const percent = size ? Math.round(100 * (size - free) / size) : 0;
        const words = size
            ? `${shown(size - free)} of ${shown(size)} used, ${shown(free)} free (${percent} %)`
            : "its size is not told";
        meter.hidden = !size;
        meter.setAttribute("aria-valuenow", percent);
        meter.setAttribute("aria-valuetext", words);
        meter.classList.toggle("warning", percent >= WARN && percent < DANGER);
        meter.classList.toggle("danger", percent >= DANGER);
        bar.style.width = `${percent}%`;
        say(text, words);
    };
    return { element: html("div", { class: "fill" }, meter, text), show };
}

function storeCard({ store }, does) {
    let current = store;
    const kind = html("span", { class: "quiet" });
    const stopped = html("p", { class: "alert danger", role: "status", hidden: true });
    const meter = meterOf(store.name);
    const body = html("tbody");
    const update = kept(body, item => volumeRow(item, does));
    const table = html(
        "table",
        { "aria-label": `Volumes of ${store.name}` },
        html("thead", {}, html("tr", {}, ...COLUMNS.map(title => html("th", { scope: "col" }, title)))),
        body);
    const making = html("p", { role: "status" });
    const none = html("p", { class: "quiet" });
    const create = html(
        "button",
        { type: "button", class: "primary", "aria-label": `Create a volume in ${store.name}`, click: () => does.create(current) },
        "Create volume");
    return {
        element: html(
            "article",
            { class: "card", "aria-label": `Store ${store.name}` },
            html("div", { class: "beside" }, html("h3", {}, store.name, " ", kind), create),
            stopped,
            meter.element,
            table,
            making,
            none),
        show: ({ store: now, users, filter }) => {
            current = now;
            create.hidden = now.fixed;
            say(kind, `${now.kind} on ${now.on}`);
            stopped.hidden = !now.stopped;
            say(stopped, now.stopped ?? "");
            meter.show(now);
            const matching = now.volumes.filter(({ path }) => path.toLowerCase().includes(filter));
            const rows = matching.slice(0, ROWS_MAX);
            update(rows.map(volume => (
                { key: volume.uuid, volume, users: users.get(volume.path) ?? [], fixed: now.fixed })));
            table.hidden = !rows.length;
            say(making, now.making.join(" "));
            const left = matching.length - rows.length;
            say(none, left ? `${left} more: filter by name.` : rows.length || now.making.length ? "" : "No volumes.");
        },
    };
}

/** Returns what shows stores in the element, with the users of their volumes by path, and the
 * volumes alone whose path has the text `filter`. `does` are the actions.
 */
export function stores(element, does) {
    const update = kept(element, item => storeCard(item, does));
    return (found, users, filter) => {
        element.removeAttribute("aria-busy");
        update(
            found.map(store => ({ key: store.uuid, store, users, filter: filter.toLowerCase() })),
            "No stores: make one with “virtlun lvstore create NAME --file FILE --size SIZE”.");
    };
}
