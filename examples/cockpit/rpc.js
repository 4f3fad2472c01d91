/** A target's JSON-RPC socket, through a channel of Cockpit's. */
import { Lines } from "./lines.js";

/** Why there is no channel, for people; `socket` is the target's. */
const PROBLEMS = {
    "not-found": socket => `No target listens on ${socket}: start it, on a host with systemd by "systemctl start virtlun-target".`,
    "access-denied": socket => `Your account may not use ${socket}: turn on administrative access, at the top of Cockpit's page.`,
};

/** Milliseconds until an answer; a target that is well needs few. */
const DEADLINE_MS = 10000;

/** Calls of one target. They are answered in their order: what may take long has one of its own. */
export class Rpc {
    #socket;
    #channel = null;
    #waiting = new Map();
    #last = 0;

    constructor(socket) {
        this.#socket = socket;
    }

    /** Calls a method; resolves to its result. Fails with an Error of one sentence, also where the
     * answer takes longer than `ms` milliseconds; null: it may take as long as it takes.
     */
    call(method, params = {}, ms = DEADLINE_MS) {
        this.#channel ??= this.#open();
        const id = ++this.#last;
        return new Promise((resolve, reject) => {
            const timer = ms && setTimeout(() => this.#late(ms), ms);
            this.#waiting.set(id, { resolve, reject, timer });
            this.#channel.send(JSON.stringify({ jsonrpc: "2.0", id, method, params }));
        });
    }

    /** Ends it; what was asked and not answered fails. A further call opens it anew. */
    close() {
        this.#channel?.close();
    }

    /** Ends it where no answer came: those to what was asked later do not come either. */
    #late(ms) {
        const channel = this.#channel;
        this.#fail(`The target on ${this.#socket} has not answered for ${ms / 1000} s. What is shown is of before.`);
        channel.close();
    }

    #open() {
        const channel = cockpit.channel({ payload: "stream", unix: this.#socket, superuser: "try" });
        const lines = new Lines();
        channel.addEventListener("message", (_event, piece) => lines.take(piece).forEach(line => this.#take(line)));
        channel.addEventListener("close", (_event, how) => {
            // Not of one that was given up.
            if (channel === this.#channel)
                this.#closed(how);
        });
        return channel;
    }

    #take(line) {
        const { id, result, error } = JSON.parse(line);
        const call = this.#waiting.get(id);
        this.#waiting.delete(id);
        clearTimeout(call?.timer);
        if (error)
            call?.reject(new Error(error.message));
        else
            call?.resolve(result);
    }

    #closed({ problem, message }) {
        const why = PROBLEMS[problem]?.(this.#socket) ??
            `The connection to ${this.#socket} ended${message || problem ? `: ${message || problem}` : "."}`;
        this.#fail(why);
    }

    #fail(why) {
        const calls = [...this.#waiting.values()];
        this.#channel = null;
        this.#waiting.clear();
        for (const { reject, timer } of calls) {
            clearTimeout(timer);
            reject(new Error(why));
        }
    }
}

/** Calls one method on a connection of its own; `ms` is as `call` has it. */
export async function callAlone(socket, method, params, ms) {
    const rpc = new Rpc(socket);
    try {
        return await rpc.call(method, params, ms);
    } finally {
        rpc.close();
    }
}
