/** Which of libvirt's domains have which volumes, running or not. */
import { run } from "./command.js";

/** Resolves to users of volumes by path, `{ vm, uuid, state }` each, and why there are none known. */
export async function read(target) {
    const users = new Map();
    try {
        for (const { domain, uuid, state, volume } of await run(...target.words, "domain", "list"))
            users.set(volume, [...users.get(volume) ?? [], { vm: domain, uuid, state }]);
        return { users, unknown: null };
    } catch (error) {
        return { users, unknown: error.message };
    }
}
