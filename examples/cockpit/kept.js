/** Elements that stay the same ones while what they show changes, with focus and selection. */

/** Shows items as children of an element: `make` returns, for an item, `{ element, show }`.
 *
 * `show` gets what there is to show of it, now and later. Returns what takes all items, each with a
 * `key` of its own, and, shown where there are none, a sentence.
 */
export function kept(parent, make) {
    const there = new Map();
    return (items, none) => {
        const keys = new Set(items.map(item => item.key));
        for (const [key, { element }] of there) {
            if (!keys.has(key)) {
                element.remove();
                there.delete(key);
            }
        }
        parent.querySelector(":scope > .quiet")?.remove();
        items.forEach((item, place) => {
            if (!there.has(item.key))
                there.set(item.key, make(item));
            const { element, show } = there.get(item.key);
            if (parent.children[place] !== element)
                parent.insertBefore(element, parent.children[place] ?? null);
            show(item);
        });
        if (!items.length && none) {
            const sentence = document.createElement("p");
            sentence.className = "quiet";
            sentence.textContent = none;
            parent.append(sentence);
        }
    };
}
