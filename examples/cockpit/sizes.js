/** Sizes as people write them: whole numbers of 1024^n bytes, as the command takes them. */
const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
const SHIFTS = { "": 0, K: 1, M: 2, G: 3, T: 4 };

/** Bytes of the unit that the target's methods count in. */
const MIB = 1024 ** 2;

/** Returns a number of bytes for people, such as 1.5 GiB. */
export function shown(bytes) {
    let unit = 0;
    for (; bytes >= 1024 && unit + 1 < UNITS.length; unit += 1)
        bytes /= 1024;
    return `${bytes >= 100 || Number.isInteger(bytes) ? Math.round(bytes) : bytes.toFixed(1)} ${UNITS[unit]}`;
}

/** Returns the MiB, rounded up, of a text such as 512M or 10 GiB. Fails with one sentence. */
export function mebibytes(text) {
    const found = /^\s*([0-9]{1,12})\s*([KMGT]?)(?:i?B)?\s*$/i.exec(text);
    const bytes = found ? Number(found[1]) * 1024 ** SHIFTS[found[2].toUpperCase()] : 0;
    if (!bytes || !Number.isSafeInteger(bytes))
        throw new Error(`"${text}" is not a size: write a whole number such as 512M, 10G or 2T.`);
    return Math.ceil(bytes / MIB);
}
