/** Who made a volume, where that is not the administrator: it goes where it was made. */
import { callAlone } from "./rpc.js";

const UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}";

/** What they note at a volume begins so; not all targets and pools tell it, and names do as well. */
const OWNERS = [
    {
        noted: "csi.",
        named: new RegExp(`^(pvc|csi|csi-vol|csi-snap)-${UUID}(@|$)`),
        says: "A driver of CSI made it, for Kubernetes: delete its PersistentVolumeClaim, or its VolumeSnapshot, there.",
    },
    {
        noted: "cinder.",
        named: new RegExp(`^(volume|snapshot|cinder)-${UUID}(@|$)`),
        says: "OpenStack's Cinder made it: delete it there.",
    },
];

/** Resolves to a sentence about a volume of the target behind a socket, or null. */
export async function ownerOf(socket, volume) {
    let noted = [];
    try {
        noted = Object.keys(await callAlone(socket, "virtlun_lvol_get_xattrs", { name: volume.uuid }));
    } catch {
        // Its name is left.
    }
    const found = OWNERS.find(owner => noted.some(key => key.startsWith(owner.noted))) ??
        OWNERS.find(owner => owner.named.test(volume.name));
    return found?.says ?? null;
}
