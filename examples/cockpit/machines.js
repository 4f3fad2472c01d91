/** The part of the page with the VMs: what each does now, and did in the last two minutes. */
import { chart } from "./chart.js";
import { html, say } from "./dom.js";
import { kept } from "./kept.js";

function latency(ns) {
    const [value, unit] = ns < 1e6 ? [ns / 1e3, "µs"] : ns < 1e9 ? [ns / 1e6, "ms"] : [ns / 1e9, "s"];
    return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${unit}`;
}

function make(vm) {
    const disks = html("p", { class: "quiet" });
    const iops = chart("I/O a second", [""], value => Math.round(value).toLocaleString("en"));
    const latencies = chart("Latency", ["p50", "p99"], latency);
    return {
        element: html(
            "article",
            { class: "card machine", "aria-label": `VM ${vm.title}` },
            html("h3", {}, vm.title),
            disks,
            html("div", { class: "charts" }, iops.element, latencies.element)),
        show: ({ iops: counts, p50, p99, disks: list }) => {
            say(disks, list.map(({ volume, lun }) => `${volume} (${lun})`).join(", "));
            iops.show([counts]);
            latencies.show([p50, p99]);
        },
    };
}

/** Adds what a VM is called: with its UUID where another one has its name. */
function titled(vm, all) {
    const alone = all.filter(({ name }) => name === vm.name).length === 1;
    const title = alone ? vm.name : `${vm.name} (${vm.uuid})`;
    return { ...vm, key: `${vm.uuid} ${title}`, title };
}

/** Returns what shows VMs in the element, and a sentence where there are none. */
export function machines(element) {
    const update = kept(element, make);
    return (vms, why) => update(vms.map(vm => titled(vm, vms)), why ?? "No running VM has a volume.");
}
