/** The targets of this host. */
import { run } from "./command.js";

/** Resolves to them, running or not, the one without a name first: what to call it, its socket, the
 * words that choose it on the command's line, and those that tell it from others in a title.
 */
export async function read() {
    const rows = await run("target", "list");
    return rows.map((row, index) => ({
        label: row.name,
        socket: row.rpc_socket,
        words: index ? ["--target", row.name] : [],
        at: rows.length > 1 ? ` at target ${row.name}` : "",
    }));
}
