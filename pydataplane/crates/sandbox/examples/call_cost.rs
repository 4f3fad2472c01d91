//! What the sandbox adds to a system call, in CPU time of this thread, so that other load hardly
//! counts: `cargo run --release -p sandbox --example call_cost`.

use rustix::time::{ClockId, clock_gettime};
use sandbox::calls::TARGET;
use sandbox::{Mode, confine};
use std::hint::black_box;

const ROUNDS: u32 = 9;
const CALLS: u32 = 200_000;

fn cpu_ns() -> i64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// Nanoseconds of a call: the least of some rounds.
fn cost(mut call: impl FnMut()) -> f64 {
    let round = |call: &mut dyn FnMut()| {
        let begin = cpu_ns();
        for _ in 0..CALLS {
            call();
        }
        (cpu_ns() - begin) as f64 / f64::from(CALLS)
    };
    (0..ROUNDS).map(|_| round(&mut call)).fold(f64::INFINITY, f64::min)
}

fn main() {
    // The cheapest call there is, and one whose arguments the filter looks at.
    let plain = || _ = black_box(rustix::process::getppid());
    let looked_at = || _ = black_box(rustix::io::ioctl_fionbio(rustix::stdio::stdin(), false));
    let before = (cost(plain), cost(looked_at));
    confine(Mode::Enforce, &TARGET).expect("seccomp");
    let after = (cost(plain), cost(looked_at));
    println!("allowed whatever its arguments: {:.0} ns, confined {:.0} ns", before.0, after.0);
    println!("allowed with some arguments:    {:.0} ns, confined {:.0} ns", before.1, after.1);
}
