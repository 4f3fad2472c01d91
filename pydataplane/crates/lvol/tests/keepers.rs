//! Lvols that keep protection information themselves need a thread, and together no more than one. Alone in its
//! program, which it counts the threads of.

mod common;

use bdev::ProtectionType;
use common::Rig;

/// Threads of this process of that name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|its| its.trim() == name).count()
}

#[test]
fn the_volumes_of_an_lvstore_have_one_thread_that_keeps_their_maps() {
    let rig = Rig::with_lvs(120);
    rig.create("plain", 2, true).unwrap();
    assert_eq!(threads("protection"), 0);
    let rig = Rig { own: Some(ProtectionType::Type1), ..rig };
    for n in 0..5u64 {
        rig.create(&format!("v{n}"), 2, true).unwrap();
        rig.open(&format!("lvs0/v{n}")).write(3, &common::tagged(n + 1, 1)).unwrap();
    }
    assert_eq!(threads("protection"), 1);
    for n in 0..5u64 {
        let mut v = rig.open(&format!("lvs0/v{n}"));
        assert_eq!(common::read_tags(&mut v, 3, 1), [n + 1]);
    }
    rig.lvstores.unload("lvs0").unwrap();
    assert_eq!(threads("protection"), 0);
}
