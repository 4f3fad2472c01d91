/** Elements of the page. Whatever comes from a host becomes text, never markup. */

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
        if (typeof value === "function")
            element.addEventListener(name, value);
        else if (value === true)
            element.setAttribute(name, "");
        else if (value !== false && value !== null)
            element.setAttribute(name, value);
    }
    element.append(...children.filter(child => child !== null));
    return element;
}

/** Makes an element; of the attributes functions are listeners, false and null are left out. */
export function html(tag, attributes = {}, ...children) {
    return filled(document.createElement(tag), attributes, children);
}

/** Makes an element of SVG. */
export function svg(tag, attributes = {}, ...children) {
    return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Gives a node this text, unless it has it: a selection in it stays. */
export function say(node, text) {
    if (node.textContent !== text)
        node.textContent = text;
}
