/** Which VMs have a volume as a disk. */

/** Returns users of volumes by path, each VM once: one that both have as the first has it. */
export function together(first, second) {
    const users = new Map(first);
    for (const [path, list] of second) {
        const there = users.get(path) ?? [];
        users.set(path, [...there, ...list.filter(({ uuid }) => !there.some(each => each.uuid === uuid))]);
    }
    return users;
}
