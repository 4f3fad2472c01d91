/** Lines of text that arrives in pieces of any length. */
export class Lines {
    #rest = "";

    /** Takes a piece; returns the lines that it completes, without their ends. */
    take(piece) {
        const lines = (this.#rest + piece).split("\n");
        this.#rest = lines.pop();
        return lines;
    }
}
