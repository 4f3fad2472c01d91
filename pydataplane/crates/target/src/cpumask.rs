//! CPU masks as SPDK writes them: hexadecimal (`0x3`) or a list (`[0,1]`, `[0-3,8]`).

use std::fmt;
use std::str::FromStr;

/// CPUs that a mask can name.
pub const MAX_CPUS: usize = 1024;

/// A set of CPUs, not empty, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuMask(Vec<usize>);

/// Why a text is no mask.
#[derive(Debug, thiserror::Error)]
#[error("{text:?} is no CPU mask: {why}; write it as 0x3 or [0,1]")]
pub struct MaskError {
    text: String,
    why: &'static str,
}

impl CpuMask {
    /// The CPUs, ascending.
    pub fn cpus(&self) -> &[usize] {
        &self.0
    }

    /// The mask of `cpus`; `None` if there are none.
    pub fn of(cpus: impl IntoIterator<Item = usize>) -> Option<CpuMask> {
        let mut cpus: Vec<_> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        (!cpus.is_empty()).then_some(CpuMask(cpus))
    }
}

impl FromStr for CpuMask {
    type Err = MaskError;

    fn from_str(text: &str) -> Result<CpuMask, MaskError> {
        let error = |why| MaskError { text: text.to_owned(), why };
        let cpus = match text.strip_prefix('[') {
            Some(list) => {
                let list = list.strip_suffix(']').ok_or_else(|| error("the ] is missing"))?;
                from_list(list).map_err(error)?
            }
            None => from_hex(text.strip_prefix("0x").unwrap_or(text)).map_err(error)?,
        };
        if cpus.iter().any(|cpu| *cpu >= MAX_CPUS) {
            return Err(error("CPUs are numbered from 0 to 1023"));
        }
        CpuMask::of(cpus).ok_or_else(|| error("it names no CPU"))
    }
}

fn from_list(list: &str) -> Result<Vec<usize>, &'static str> {
    let number = |s: &str| s.trim().parse().map_err(|_| "a CPU is not a number");
    let mut cpus = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (number(first)?, number(last)?);
        if first > last || last >= MAX_CPUS {
            return Err("a range is not ascending, or ends beyond CPU 1023");
        }
        cpus.extend(first..=last);
    }
    Ok(cpus)
}

fn from_hex(digits: &str) -> Result<Vec<usize>, &'static str> {
    let mut cpus = Vec::new();
    for (i, digit) in digits.bytes().rev().enumerate() {
        let bits = (digit as char).to_digit(16).ok_or("a digit is not hexadecimal")?;
        cpus.extend((0..4).filter(|bit| bits >> bit & 1 == 1).map(|bit| 4 * i + bit));
    }
    Ok(cpus)
}

impl fmt::Display for CpuMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let highest = *self.0.last().expect("a mask is not empty");
        let mut digits = vec![0u8; highest / 4 + 1];
        for cpu in &self.0 {
            digits[cpu / 4] |= 1 << (cpu % 4);
        }
        f.write_str("0x")?;
        digits.iter().rev().try_for_each(|digit| write!(f, "{digit:x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_mean_the_same() {
        for (text, cpus, shown) in [
            ("0x3", &[0, 1][..], "0x3"),
            ("3", &[0, 1], "0x3"),
            ("[0,1]", &[0, 1], "0x3"),
            ("[2-4, 9,2]", &[2, 3, 4, 9], "0x21c"),
            ("0x10000000000000000", &[64], "0x10000000000000000"),
        ] {
            let mask: CpuMask = text.parse().unwrap();
            assert_eq!(mask.cpus(), cpus, "{text}");
            assert_eq!(mask.to_string(), shown);
        }
    }

    #[test]
    fn what_is_no_mask_is_refused_with_the_reason() {
        for (text, why) in [
            ("", "names no CPU"),
            ("0x0", "names no CPU"),
            ("0xg", "not hexadecimal"),
            ("[0", "] is missing"),
            ("[]", "not a number"),
            ("[3-1]", "not ascending"),
            ("[0-99999999]", "beyond CPU 1023"),
        ] {
            let e = text.parse::<CpuMask>().unwrap_err().to_string();
            assert!(e.contains(why), "{text}: {e}");
        }
    }
}
