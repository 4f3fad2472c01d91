/** Light or dark, as Cockpit's user chose it, else as the browser has it. */

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function apply(style) {
    const chosen = style ?? localStorage.getItem("shell:style") ?? "auto";
    document.documentElement.classList.toggle("dark", chosen === "dark" || (chosen === "auto" && dark.matches));
}

/** Follows the choice: Cockpit keeps it in the browser, and tells its pages of a change. */
export function follow() {
    window.addEventListener("storage", event => event.key === "shell:style" && apply());
    window.addEventListener("cockpit-style", event => apply(event.detail.style));
    dark.addEventListener("change", () => apply());
    apply();
}
