/** What the VMs do, as `virtlun top` tells it, and what they did in the last minutes. */
import { follow } from "./command.js";

/** Seconds between two looks, and how many are kept: two minutes. */
const EVERY_S = 2;
export const POINTS = 60;

/** Milliseconds until it is tried again where the command ended: the target may be away. */
const AGAIN_MS = 5000;

/** Follows a target. `changed` gets the VMs, with `name`, `uuid`, `iops`, `p50` and `p99` (nanoseconds, or
 * null), the newest last, and their disks; the users of volumes by path; and a sentence if there is
 * none to follow. Returns what ends it: the target counts latencies until then.
 */
export function watch(target, changed) {
    const histories = new Map();
    let end = null;
    let timer = null;
    let ended = false;

    const take = rates => {
        if (ended)
            return;
        for (const uuid of histories.keys()) {
            if (!(uuid in rates.vms))
                histories.delete(uuid);
        }
        for (const [uuid, vm] of Object.entries(rates.vms)) {
            const before = histories.get(uuid) ?? { iops: [], p50: [], p99: [] };
            const added = (list, value) => [...list, value].slice(-POINTS);
            histories.set(uuid, {
                uuid,
                name: vm.name,
                iops: added(before.iops, vm.num_read_ops + vm.num_write_ops),
                p50: added(before.p50, vm.p50_ns),
                p99: added(before.p99, vm.p99_ns),
                disks: vm.disks,
            });
        }
        changed([...histories.values()].sort(byName), usersOf(rates), null);
    };
    const begin = () => {
        const words = [...target.words, "top", "--interval", String(EVERY_S)];
        end = follow(words, take, why => {
            end = null;
            if (ended)
                return;
            histories.clear();
            changed([], new Map(), why ?? "The command virtlun top ended.");
            timer = setTimeout(begin, AGAIN_MS);
        });
    };
    begin();
    return () => {
        ended = true;
        clearTimeout(timer);
        end?.();
    };
}

function byName(one, other) {
    return one.name === other.name ? one.uuid < other.uuid ? -1 : 1 : one.name < other.name ? -1 : 1;
}

function usersOf(rates) {
    const users = new Map();
    for (const [path, { uses }] of Object.entries(rates.bdevs)) {
        if (uses.length)
            users.set(path, uses.map(({ vm, uuid }) => ({ vm, uuid, state: "running" })));
    }
    return users;
}
