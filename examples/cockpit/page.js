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
import { again, whileVisible } from "./visible.js";

/** Milliseconds between two looks at the stores, and at libvirt's domains, which take longer. */
const STORES_MS = 3000;
const DOMAINS_MS = 30000;

const part = id => document.getElementById(id);

/** Returns users of volumes by path, each VM once: those that run as the target tells it. */
function together(running, defined) {
    const users = new Map(running);
    for (const [path, list] of defined) {
        const there = users.get(path) ?? [];
        users.set(path, [...there, ...list.filter(({ vm }) => !there.some(each => each.vm === vm))]);
    }
    return users;
}

/** Shows a target for as long as the page is visible; returns what ends that. */
function follows(target) {
    const rpc = new Rpc(target.socket);
    let seen = null;
    let running = new Map();
    let defined = new Map();

    const showStores = stores(part("stores"), actions(target.socket, () => looking.now()));
    const showMachines = machines(part("machines"));
    const show = () => seen && showStores(seen, together(running, defined), part("filter").value);
    const looking = again(STORES_MS, async () => {
        try {
            seen = await storage.read(rpc);
            part("search").hidden = !seen.some(({ volumes }) => volumes.length > 10);
            alerts.clear("target");
            show();
        } catch (error) {
            alerts.tell("target", error.message);
        }
    });
    const asking = again(DOMAINS_MS, async () => {
        const { users, unknown } = await domains.read(target);
        defined = users;
        say(part("unknown"), unknown ? `Which VMs that are shut off have volumes is not known: ${unknown}` : "");
        show();
    });
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
    };
}

/** Has the page show the target that is chosen, from now on. */
function choose(list) {
    const select = part("target");
    select.replaceChildren(...list.map(({ label }, index) => html("option", { value: index }, label)));
    part("choice").hidden = list.length < 2;
    const chosen = () => list[select.value];
    let end = null;
    const begin = () => {
        for (const id of ["stores", "machines"])
            part(id).replaceChildren();
        end = follows(chosen());
    };
    const check = () => findings(part("findings"), part("count"), part("check"), chosen());
    select.addEventListener("change", () => {
        end?.();
        begin();
        check();
    });
    part("check").addEventListener("click", check);
    whileVisible(() => {
        begin();
        return () => end();
    });
    check();
}

follow();
cockpit.transport.wait(() => targets.read().then(choose, error => {
    alerts.tell("target", error.message);
    for (const id of ["stores", "machines", "count"])
        part(id).replaceChildren();
}));
