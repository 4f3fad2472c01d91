/** Dialogs: some fields, one action, and one sentence where that fails. */
import { tell } from "./alerts.js";
import { html, say } from "./dom.js";

let count = 0;

function fieldOf({ name, label, hint = null, value = "", checkbox = false }, id) {
    const input = html("input", {
        id,
        name,
        type: checkbox ? "checkbox" : "text",
        autocomplete: "off",
        spellcheck: "false",
        "aria-describedby": hint ? `${id}-hint` : null,
    });
    if (!checkbox)
        input.value = value;
    const text = html("label", { for: id }, label);
    return {
        name,
        value: () => checkbox ? input.checked : input.value.trim(),
        element: html(
            "div",
            { class: checkbox ? "field checkbox" : "field" },
            ...(checkbox ? [input, text] : [text, input]),
            hint && html("p", { id: `${id}-hint`, class: "quiet" }, hint)),
    };
}

/** Shows a dialog. `act` gets the values of its fields, by their names, and returns a promise.
 *
 * It is called once, however often the button is pressed: until it has failed, which leaves the
 * dialog there with its sentence. Who closes the dialog meanwhile is told at the top of the page.
 * The button can be pressed where `ready` says so of the values. `text` are sentences above; more of
 * them, without which nobody is to decide, `asked` resolves to, or fails with one.
 */
export function ask({ title, text = [], asked = null, fields, action, danger = false, ready = () => true, act }) {
    const id = `dialog${++count}`;
    const inputs = fields.map(field => fieldOf(field, `${id}-${field.name}`));
    const values = () => Object.fromEntries(inputs.map(input => [input.name, input.value()]));
    const failure = html("p", { role: "alert", class: "alert danger", hidden: true });
    const button = html("button", { class: danger ? "danger" : "primary" }, action);
    const cancel = html("button", { type: "button", class: "secondary", click: () => dialog.close() }, "Cancel");
    const more = html("div", { role: "status" }, asked && html("p", { class: "quiet" }, "Asking who has it…"));
    let acting = false;
    let knows = asked === null;

    const update = () => {
        button.disabled = acting || !knows || !ready(values());
        form.setAttribute("aria-busy", acting);
        say(cancel, acting ? "Close" : "Cancel");
    };
    const submit = async event => {
        event.preventDefault();
        if (button.disabled)
            return;
        acting = true;
        failure.hidden = true;
        update();
        try {
            await act(values());
            dialog.close();
        } catch (error) {
            say(failure, error.message);
            failure.hidden = false;
            if (!dialog.open)
                tell(title, `${title}: ${error.message}`);
        }
        acting = false;
        update();
    };

    const form = html(
        "form",
        { submit, input: update, novalidate: true },
        html("h2", { id: `${id}-title` }, title),
        ...text.map(sentence => html("p", {}, sentence)),
        more,
        ...inputs.map(input => input.element),
        failure,
        html("div", { class: "buttons" }, button, cancel));
    const dialog = html("dialog", { "aria-labelledby": `${id}-title`, close: () => dialog.remove() }, form);
    document.body.append(dialog);
    update();
    dialog.showModal();
    asked?.catch(error => [error.message]).then(sentences => {
        more.replaceChildren(...sentences.map(sentence => html("p", {}, sentence)));
        knows = true;
        update();
    });
}
