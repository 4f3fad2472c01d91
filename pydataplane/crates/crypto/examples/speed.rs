//! Gigabytes a second that one thread encrypts and decrypts.
//!
//! ```text
//! cargo run --release -p crypto --example speed
//! ```

use crypto::{Key, Xts};
use std::time::{Duration, Instant};

const BYTES: usize = 64 << 10;
const TIME: Duration = Duration::from_secs(1);

fn speed(mut work: impl FnMut()) -> f64 {
    let (begun, mut rounds) = (Instant::now(), 0u32);
    while begun.elapsed() < TIME {
        work();
        rounds += 1;
    }
    f64::from(rounds) * BYTES as f64 / begun.elapsed().as_secs_f64() / 1e9
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut data = vec![7; BYTES];
    for digits in [32, 64] {
        let key = Key::from_hex("k", &"01".repeat(digits / 2), &"02".repeat(digits / 2), false)?;
        for block in [512, 4096] {
            let mut xts = Xts::new(&key, block)?;
            let encrypt = speed(|| xts.encrypt(7, &mut data).expect("it encrypts"));
            let decrypt = speed(|| xts.decrypt(7, &mut data).expect("it decrypts"));
            println!(
                "AES-{}-XTS, {block:4} bytes: encrypt {encrypt:.2}, decrypt {decrypt:.2} GB/s",
                key.bits()
            );
        }
    }
    Ok(())
}
