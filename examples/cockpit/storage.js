/** What a target has: stores, which are lvstores and pools, and the volumes in them. */

/** What a store is, by what the target calls its kind; no kind is an lvstore's. */
const KINDS = {
    rbd: "pool of Ceph",
    iscsi: "LUNs of an iSCSI target",
    nvme: "namespaces of an NVMe subsystem",
};
const ARRAYS = ["iscsi", "nvme"];

/** Asks a target; resolves to its stores by name, with their volumes by name. Sizes are bytes. */
export async function read(rpc) {
    const [stores, lvols] = await Promise.all(
        [rpc.call("bdev_lvol_get_lvstores"), rpc.call("bdev_lvol_get_lvols")]);
    return stores.map(store => storeOf(store, lvols.filter(lvol => lvol.lvs.uuid === store.uuid))).sort(byName);
}

function byName(one, other) {
    return one.name < other.name ? -1 : 1;
}

function storeOf(store, lvols) {
    return {
        name: store.name,
        uuid: store.uuid,
        kind: store.kind ? KINDS[store.kind] ?? store.kind : "lvstore",
        /** An array's LUNs are made, grown and deleted by the array. */
        fixed: ARRAYS.includes(store.kind),
        /** A pool's volumes are thin in any case. */
        thin: Boolean(store.kind),
        on: store.base_bdev,
        size: store.total_data_clusters * store.cluster_size,
        free: store.free_clusters * store.cluster_size,
        stopped: store.stopped ?? null,
        making: (store.zeroing ?? []).filter(({ uuid }) => !lvols.some(lvol => lvol.uuid === uuid)).map(makingOf),
        volumes: lvols.map(lvol => volumeOf(lvol, store)).sort(byName),
    };
}

function volumeOf(lvol, store) {
    const zeroed = store.zeroing?.find(each => each.uuid === lvol.uuid);
    return {
        name: lvol.name,
        path: `${store.name}/${lvol.name}`,
        uuid: lvol.uuid,
        size: lvol.size,
        allocated: lvol.num_allocated_clusters * store.cluster_size,
        kind: lvol.is_snapshot ? "snapshot" : lvol.is_thin_provisioned ? "thin" : "thick",
        snapshot: lvol.is_snapshot,
        state: stateOf(lvol, zeroed),
    };
}

/** Returns how far a thick volume is that is no volume before its clusters are zeroed. */
function makingOf(zeroed) {
    return `Making ${zeroed.alias}: ${percentOf(zeroed)} % zeroed.`;
}

function percentOf({ done, total }) {
    return Math.floor(100 * done / Math.max(total, 1));
}

/** Returns what keeps a volume from its use, or null. */
function stateOf(lvol, zeroed) {
    if (zeroed)
        return `${percentOf(zeroed)} % zeroed`;
    if (lvol.waits_for_key)
        return `waits for key ${lvol.key_name}`;
    return lvol.is_degraded ? "what it is a clone of is missing" : null;
}
