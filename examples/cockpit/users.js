/** Which VMs have a volume as a disk. */

/** Returns users of volumes by path, each VM once: those that run as the target tells it. */
export function together(running, defined) {
    const users = new Map(running);
    for (const [path, list] of defined) {
        const there = users.get(path) ?? [];
        users.set(path, [...there, ...list.filter(({ uuid }) => !there.some(each => each.uuid === uuid))]);
    }
    return users;
}
