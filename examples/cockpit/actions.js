/** What an administrator does with volumes, each by a dialog and one call of the target. */
import { ask } from "./dialog.js";
import { ownerOf } from "./owners.js";
import { callAlone } from "./rpc.js";
import { mebibytes, shown } from "./sizes.js";

/** As the command takes them; a snapshot is VOLUME@NAME. */
const VOLUME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$/;
const SNAPSHOT = /^[A-Za-z0-9._-]{1,62}$/;

const SIZE_HINT = "A whole number, such as 512M, 10G or 2T; the store rounds it up.";
const MIB = 1024 ** 2;

function named(name, pattern) {
    if (!pattern.test(name))
        throw new Error(`"${name}" is no name here: use up to 63 letters, digits, dots, hyphens and underscores.`);
    return name;
}

/** Returns the local time as it can stand in a name: 20260131-235959. */
function now() {
    const at = new Date();
    const parts = [at.getFullYear(), at.getMonth() + 1, at.getDate(), at.getHours(), at.getMinutes(), at.getSeconds()];
    const [year, month, day, ...time] = parts.map(part => String(part).padStart(2, "0"));
    return `${year}${month}${day}-${time.join("")}`;
}

/** Returns who has a volume as a disk, and who made it, in sentences; `usersOf` is as below. */
async function warnings(target, volume, usersOf) {
    const [{ users, unknown }, owner] = await Promise.all([usersOf(volume), ownerOf(target.socket, volume)]);
    return [
        ...users.map(({ vm, state }) => `${vm} has it as a disk${state === "running" ? "" : ", and will not start without it"}.`),
        ...unknown ? [`Which VMs that are shut off have it is not known: ${unknown}`] : [],
        ...owner ? [owner] : [],
    ];
}

/** Returns the actions on a target (targets.js); `changed` is called after each.
 *
 * `usersOf` resolves to the users of a volume now, and why there may be more of them, or null.
 */
export function actions(target, changed, usersOf) {
    const call = async (method, params) => {
        // What takes long is seen in the list of volumes meanwhile.
        setTimeout(changed, 500);
        try {
            // Some write whole volumes; that a target is silent the list of its volumes tells.
            await callAlone(target.socket, method, params, null);
        } finally {
            changed();
        }
    };
    return {
        create: store => ask({
            title: `Create a volume in ${store.name}${target.at}`,
            fields: [
                { name: "name", label: "Name" },
                { name: "size", label: "Size", hint: SIZE_HINT },
                ...store.thin
                    ? []
                    : [{ name: "thin", label: "Thin: take room as it is written", checkbox: true }],
            ],
            action: "Create",
            ready: ({ name, size }) => Boolean(name && size),
            act: async ({ name, size, thin = true }) => call("bdev_lvol_create", {
                lvs_name: store.name,
                lvol_name: named(name, VOLUME),
                size_in_mib: mebibytes(size),
                thin_provision: thin,
            }),
        }),
        grow: volume => ask({
            title: `Grow ${volume.path}${target.at}`,
            text: [`It has ${shown(volume.size)}. A running VM sees the new size at once.`],
            fields: [{ name: "size", label: "New size", hint: SIZE_HINT }],
            action: "Grow",
            ready: ({ size }) => Boolean(size),
            act: async ({ size }) => {
                const wanted = mebibytes(size);
                if (wanted * MIB <= volume.size)
                    throw new Error(`It has ${shown(volume.size)} already: write more, as volumes only grow here.`);
                await call("bdev_lvol_resize", { name: volume.uuid, size_in_mib: wanted });
            },
        }),
        snapshot: volume => ask({
            title: `Take a snapshot of ${volume.path}${target.at}`,
            text: ["It holds what was written until then, also while a VM writes on."],
            fields: [{ name: "name", label: "Name of the snapshot", value: now() }],
            action: "Take snapshot",
            ready: ({ name }) => Boolean(name),
            act: async ({ name }) => call("bdev_lvol_snapshot", {
                lvol_name: volume.uuid,
                snapshot_name: `${volume.name}@${named(name, SNAPSHOT)}`,
            }),
        }),
        remove: volume => ask({
            title: `Delete ${volume.path}${target.at}?`,
            text: [`All its data is lost: ${shown(volume.size)}, of which ${shown(volume.allocated)} are allocated.`],
            asked: warnings(target, volume, usersOf),
            fields: [{ name: "name", label: `Type ${volume.name} to delete it` }],
            action: "Delete",
            danger: true,
            ready: ({ name }) => name === volume.name,
            act: async () => call("bdev_lvol_delete", { name: volume.uuid }),
        }),
    };
}
