/** The page: which target it is of, and what is asked how often. */
import { actions } from "./actions.js";
import { watch } from "./activity.js";
import * as alerts from "./alerts.js";
import * as domains from "./domains.js";
import { html, say } from "./dom.js";
import { findings } from "./findings.js";
import { machines } from "./machines.js";
import { Rpc } from "./rpc.js";
import * as storage from "./storage.js";
import { stores } from "./stores.js";
import * as targets from "./targets.js";
import { follow } from "./theme.js";
import { together } from "./users.js";
import { again, whileVisible } from "./visible.js";

/** Milliseconds between two looks at the stores, and at libvirt's domains, which take longer. */
const STORES_MS = 3000;
const DOMAINS_MS = 30000;

const part = id => document.getElementById(id);

/** Shows a target for as long as the page is visible; returns what ends that. */
function follows(target) {
    const rpc = new Rpc(target.socket);
    let seen = null;
    let running = new Map();
    let defined = new Map();

    for (const id of ["stores", "machines", "unknown"])
        part(id).replaceChildren();
    const usersOf = async ({ path }) => {
        const { users, unknown } = await domains.read(target);
        // What libvirt says is newer.
        return { users: together(users, running).get(path) ?? [], unknown };
    };
    const showStores = stores(part("stores"), actions(target, () => looking.now(), usersOf));
    const showMachines = machines(part("machines"));
    const show = () => seen && showStores(seen, together(running, defined), part("filter").value);
    const wrong = error => alerts.tell("target", error.message);
    const looking = again(STORES_MS, () => storage.read(rpc), found => {
        seen = found;
        part("search").hidden = !seen.some(({ volumes }) => volumes.length > 10);
        alerts.clear("target");
        show();
    }, wrong);
    const asking = again(DOMAINS_MS, () => domains.read(target), ({ users, unknown }) => {
        defined = users;
        say(part("unknown"), unknown ? `Which VMs that are shut off have volumes is not known: ${unknown}` : "");
        show();
    }, wrong);
    const unwatch = watch(target, (vms, users, why) => {
        running = users;
        showMachines(vms, why);
        show();
    });
    part("filter").addEventListener("input", show);
    return () => {
        looking.end();
        asking.end();
        unwatch();
        rpc.close();
        part("filter").removeEventListener("input", show);
        alerts.clear("target");
    };
}

/** Has the page show the target that is chosen, from now on. */
function choose(list) {
    const select = part("target");
    select.replaceChildren(...list.map(({ label }, index) => html("option", { value: index }, label)));
    part("choice").hidden = list.length < 2;
    const chosen = () => list[select.value];
    const check = () => findings(part("findings"), part("count"), part("check"), chosen());
    const anew = whileVisible(() => follows(chosen()));
    select.addEventListener("change", () => {
        anew();
        part("findings").replaceChildren();
        say(part("count"), "Checking…");
        check();
    });
    part("check").addEventListener("click", check);
    check();
}

follow();
cockpit.transport.wait(() => targets.read().then(choose, error => {
    alerts.tell("target", error.message);
    for (const id of ["stores", "machines", "count"])
        part(id).replaceChildren();
}));
