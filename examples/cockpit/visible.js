/** What goes on as long as somebody looks at the page. */

/** Calls `begin` while the page is visible, which returns what ends it, called when it is not.
 *
 * Returns what has it begin anew.
 */
export function whileVisible(begin) {
    let end = null;
    const leave = () => {
        end?.();
        end = null;
    };
    const look = () => {
        if (cockpit.hidden)
            leave();
        else
            end ??= begin();
    };
    cockpit.addEventListener("visibilitychange", look);
    window.addEventListener("pagehide", leave);
    window.addEventListener("pageshow", look);
    look();
    return () => {
        leave();
        look();
    };
}

/** Asks now and, each time `ms` milliseconds after that has ended, again.
 *
 * `ask` is async; `told` gets its answer, `failed` the Error that it, or `told`, threw. Returns what
 * has it ask now, and what ends it: from then on neither is called, not of what is under way either.
 */
export function again(ms, ask, told, failed) {
    let timer = null;
    let running = false;
    let wanted = false;
    let ended = false;
    const once = async () => {
        try {
            const answer = await ask();
            if (!ended)
                told(answer);
        } catch (error) {
            if (!ended)
                failed(error);
        }
    };
    const now = async () => {
        clearTimeout(timer);
        wanted = true;
        if (running)
            return;
        running = true;
        try {
            while (wanted && !ended) {
                wanted = false;
                await once();
            }
        } finally {
            running = false;
            if (!ended)
                timer = setTimeout(now, ms);
        }
    };
    now();
    return {
        now,
        end: () => {
            ended = true;
            clearTimeout(timer);
        },
    };
}
