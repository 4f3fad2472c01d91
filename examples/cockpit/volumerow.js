/** A row of the table of volumes. */
import { html, say } from "./dom.js";
import { shown } from "./sizes.js";

/** What is said of a VM that has the volume as a disk. */
function words({ vm, state }) {
    return state === "running" ? vm : `${vm} (${state})`;
}

/** Makes the row of a volume; `does` are the actions. */
export function volumeRow({ volume }, does) {
    let current = { volume, users: [] };
    const cell = title => html("td", { "data-label": title });
    const [size, takes, kind, used] = ["Size", "Takes", "Kind", "Used by"].map(cell);
    const name = html("th", { scope: "row", "data-label": "Volume" });
    const button = (title, act) => html(
        "button",
        { type: "button", class: "link", "aria-label": `${title} ${volume.path}`, click: () => act(current) },
        title);
    const grow = button("Grow", ({ volume: it }) => does.grow(it));
    const snapshot = button("Snapshot", ({ volume: it }) => does.snapshot(it));
    const remove = button("Delete", ({ volume: it }) => does.remove(it));
    return {
        element: html(
            "tr", {}, name, size, takes, kind, used,
            html("td", { "data-label": "Actions", class: "actions" }, grow, snapshot, remove)),
        show: item => {
            current = item;
            const { volume: now, users, fixed } = item;
            say(name, now.name);
            say(size, shown(now.size));
            say(takes, shown(now.allocated));
            say(kind, now.state ? `${now.kind}, ${now.state}` : now.kind);
            say(used, users.map(words).join(", ") || "–");
            grow.hidden = snapshot.hidden = fixed || now.snapshot;
            remove.hidden = fixed;
        },
    };
}
