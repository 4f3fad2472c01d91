/** A target's JSON-RPC socket, through a channel of Cockpit's. */
import { Lines } from "./lines.js";

/** Why there is no channel, for people; `socket` is the target's. */
const PROBLEMS = {
    "not-found": socket => `No target listens on ${socket}: start it, on a host with systemd by "systemctl start virtlun-target".`,
    "access-denied": socket => `Your account may not use ${socket}: turn on administrative access, at the top of Cockpit's page.`,
};

/** Calls of one target. They are answered in their order: what may take long has one of its own. */
export class Rpc {
    #socket;
    #channel = null;
    #waiting = new Map();
    #last = 0;

    constructor(socket) {
        this.#socket = socket;
    }

    /** Calls a method; resolves to its result. Fails with an Error of one sentence. */
    call(method, params = {}) {
        this.#channel ??= this.#open();
        const id = ++this.#last;
        return new Promise((resolve, reject) => {
            this.#waiting.set(id, { resolve, reject });
            this.#channel.send(JSON.stringify({ jsonrpc: "2.0", id, method, params }));
        });
    }

    /** Ends it; what was asked and not answered fails. A further call opens it anew. */
    close() {
        this.#channel?.close();
    }

    #open() {
        const channel = cockpit.channel({ payload: "stream", unix: this.#socket, superuser: "try" });
        const lines = new Lines();
        channel.addEventListener("message", (_event, piece) => lines.take(piece).forEach(line => this.#take(line)));
        channel.addEventListener("close", (_event, how) => this.#closed(how));
        return channel;
    }

    #take(line) {
        const { id, result, error } = JSON.parse(line);
        const call = this.#waiting.get(id);
        this.#waiting.delete(id);
        if (error)
            call?.reject(new Error(error.message));
        else
            call?.resolve(result);
    }

    #closed({ problem, message }) {
        const why = PROBLEMS[problem]?.(this.#socket) ??
            `The connection to ${this.#socket} ended${message || problem ? `: ${message || problem}` : "."}`;
        const calls = [...this.#waiting.values()];
        this.#channel = null;
        this.#waiting.clear();
        calls.forEach(call => call.reject(new Error(why)));
    }
}

/** Calls one method on a connection of its own, for as long as it takes. */
export async function callAlone(socket, method, params) {
    const rpc = new Rpc(socket);
    try {
        return await rpc.call(method, params);
    } finally {
        rpc.close();
    }
}
