/** What goes on as long as somebody looks at the page. */

/** Calls `begin` while the page is visible, which returns what ends it, called when it is not. */
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
}

/** Calls an async function now and, each time `ms` milliseconds after it has ended, again.
 *
 * Returns what ends that, and what has it called now.
 */
export function again(ms, task) {
    let timer = null;
    let running = false;
    let wanted = false;
    let ended = false;
    const now = async () => {
        clearTimeout(timer);
        wanted = true;
        if (running)
            return;
        running = true;
        while (wanted && !ended) {
            wanted = false;
            await task();
        }
        running = false;
        if (!ended)
            timer = setTimeout(now, ms);
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
