//! Names, claims, removals and events.

use super::index::REMEMBERED;
use super::*;
use crate::{Channel, Features, Geometry, Null, OpenError};
use reactor::IoContext;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use uuid::Uuid;

fn null(name: &str) -> Arc<Null> {
    Null::create(name, 512, 8, None).unwrap()
}

#[test]
fn found_by_name_and_uuid_and_listed_in_order() {
    let r = Registry::new();
    for n in ["b", "a", "c"] {
        r.register(null(n)).unwrap();
    }
    let a = r.get("a").unwrap();
    assert_eq!(r.get(&a.uuid().to_string()).unwrap().name(), "a");
    assert_eq!(r.get(&a.uuid().to_string().to_uppercase()).unwrap().name(), "a");
    assert!(r.get("d").is_none());
    let names: Vec<_> = r.list().iter().map(|b| b.name().to_owned()).collect();
    assert_eq!(names, ["b", "a", "c"]);
    assert!(r.get_as::<Null>("a").is_some());
    assert!(r.get_as::<crate::Malloc>("a").is_none());
}

/// A null device with an alias that changes; counts how often it was asked for it.
struct Named {
    null: Arc<Null>,
    alias: Mutex<String>,
    asked: AtomicUsize,
    below: Option<&'static str>,
}

impl Named {
    fn new(name: &str, alias: &str) -> Arc<Named> {
        let alias = Mutex::new(alias.to_owned());
        Arc::new(Named { null: null(name), alias, asked: AtomicUsize::new(0), below: None })
    }

    fn asked(&self) -> usize {
        self.asked.swap(0, Ordering::Relaxed)
    }
}

impl Bdev for Named {
    fn name(&self) -> &str {
        self.null.name()
    }
    fn aliases(&self) -> Vec<String> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        vec![self.alias.lock().clone()]
    }
    fn uuid(&self) -> Uuid {
        self.null.uuid()
    }
    fn product_name(&self) -> &'static str {
        self.null.product_name()
    }
    fn geometry(&self) -> Geometry {
        self.null.geometry()
    }
    fn features(&self) -> Features {
        self.null.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        self.null.open(io)
    }
    fn driver_specific(&self) -> serde_json::Value {
        self.null.driver_specific()
    }
    fn below(&self) -> Option<&str> {
        self.below
    }
}

#[test]
fn devices_are_asked_for_their_names_only_after_names_have_changed() {
    let r = Registry::new();
    let all: Vec<_> = (0..20).map(|n| Named::new(&format!("b{n}"), &format!("s/{n}"))).collect();
    let asked = || all.iter().map(|b| b.asked()).sum::<usize>();
    let find = |alias: &str| r.get(alias).map(|b| b.name().to_owned());
    let rename = |n: usize, alias: &str| {
        alias.clone_into(&mut all[n].alias.lock());
        aliases_changed(all[n].name());
    };
    // Other tests of this process change names, too, but not as often as there are devices.
    let others = |questions: usize| assert!(questions < 20 * 20 / 2, "{questions}");
    for b in &all {
        r.register(b.clone()).unwrap();
    }
    others(asked());
    (0..20).for_each(|n| assert_eq!(find(&format!("s/{n}")), Some(format!("b{n}"))));
    (0..20).for_each(|n| assert_eq!(find(&format!("s/none{n}")), None));
    others(asked());
    // One that has another name is asked alone, unless many of this process have.
    rename(6, "s/new");
    assert_eq!(find("s/new").as_deref(), Some("b6"));
    assert_eq!(find("s/6"), None);
    others(asked());
    // Two that change theirs with each other.
    "s/5".clone_into(&mut all[4].alias.lock());
    rename(5, "s/4");
    aliases_changed("b4");
    assert_eq!((find("s/4").as_deref(), find("s/5").as_deref()), (Some("b5"), Some("b4")));
    // More at once than are remembered.
    for n in 0..REMEMBERED + 2 {
        rename(n % 3, &format!("s/many{n}"));
    }
    for n in REMEMBERED - 1..REMEMBERED + 2 {
        assert_eq!(find(&format!("s/many{n}")), Some(format!("b{}", n % 3)));
    }
    // The name of one that was renamed may be another one's.
    rename(7, "s/old");
    assert_eq!(find("s/7"), None);
    rename(8, "s/7");
    assert_eq!(find("s/7").as_deref(), Some("b8"));
    assert_eq!(find("s/old").as_deref(), Some("b7"));
    r.unregister("b8").unwrap();
    assert_eq!(find("s/7"), None);
    let again = Named::new("b8", "s/7");
    r.register(again).unwrap();
    assert_eq!(find("s/7").as_deref(), Some("b8"));
    let e = r.register(Named::new("b20", "s/old")).unwrap_err();
    assert_eq!(e.to_string(), "the name s/old is taken by the Null disk b7: choose another");
    // Renamed between what it said of itself and its registration, by somebody else.
    let late = Named::new("late", "s/late");
    let keys = Keys::of(&*late);
    "s/early".clone_into(&mut late.alias.lock());
    aliases_changed("late");
    assert_eq!(find("s/none"), None); // brings the index up to date
    let mut index = Index::of(&[]);
    index.insert("late", keys);
    assert!(!index.is_current(), "what was asked before a change is not current after it");
}

#[test]
fn a_taken_name_or_uuid_is_refused_and_nothing_changes() {
    let r = Registry::new();
    let a = null("a");
    r.register(a.clone()).unwrap();
    let e = r.register(null("a")).unwrap_err();
    assert_eq!(e.to_string(), "the name a is taken by the Null disk a: choose another");
    let twin = Null::create("b", 512, 8, Some(a.uuid())).unwrap();
    assert!(matches!(r.register(twin), Err(RegistryError::NameTaken { .. })));
    assert_eq!(r.list().len(), 1);
}

#[test]
fn a_claim_names_its_owner_and_ends_with_its_guard() {
    let r = Registry::new();
    r.register(null("a")).unwrap();
    let claim = r.claim("a", "lvstore lvs0").unwrap();
    let e = r.claim_as("a", "controller vm-1", ClaimMode::Shared).unwrap_err();
    assert_eq!(e.to_string(), "bdev a is in use by lvstore lvs0: release it there first");
    drop(claim);
    let one = r.claim_as("a", "controller vm-1", ClaimMode::Shared).unwrap();
    let two = r.claim_as("a", "controller vm-2", ClaimMode::Shared).unwrap();
    assert!(r.claim("a", "x").is_err());
    assert_eq!(r.owners("a").len(), 2);
    drop((one, two));
    assert!(r.owners("a").is_empty());
    let _held = r.claim("a", "x").unwrap();
}

#[test]
fn unregister_hides_tells_and_waits_for_holders() {
    let r = Registry::new();
    r.register(null("a")).unwrap();
    let held = Arc::new(Mutex::new(Some(r.claim("a", "me").unwrap())));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sub = {
        let (held, seen) = (held.clone(), seen.clone());
        r.subscribe(move |e| {
            seen.lock().push(format!("{e:?}"));
            if matches!(e, Event::Removed(_)) {
                let held = held.lock().take();
                std::thread::spawn(move || drop(held));
            }
        })
    };
    assert_eq!(r.unregister("a").unwrap().name(), "a");
    assert!(r.get("a").is_none());
    assert_eq!(*seen.lock(), ["Removed(\"a\")"]);
    r.register(null("a")).unwrap();
    r.notify_resized("a");
    drop(sub);
    r.notify_resized("a");
    assert_eq!(seen.lock().len(), 3);
}

#[test]
fn a_holder_that_stays_is_named_and_a_second_try_goes_on() {
    let r = Registry::new();
    r.register(null("a")).unwrap();
    let held = r.claim("a", "lvstore lvs0").unwrap();
    let e = r.unregister_within("a", Duration::ZERO).unwrap_err();
    assert_eq!(e.to_string(), "bdev a is removed, but lvstore lvs0 has not let go of it after 0 s");
    assert!(r.get("a").is_none());
    assert!(r.register(null("a")).is_err(), "the name is taken until the removal ends");
    let e = r.unregister_within("a", Duration::ZERO).unwrap_err();
    assert!(matches!(e, RegistryError::StillHeld { .. }), "{e}");
    thread::scope(|s| {
        let waits = s.spawn(|| r.unregister_within("a", Duration::from_secs(60)));
        drop(held);
        // It may have come too late to wait.
        if let Err(e) = waits.join().unwrap() {
            assert!(matches!(e, RegistryError::NotFound(_)), "{e}");
        }
    });
    assert!(matches!(r.unregister("a"), Err(RegistryError::NotFound(_))));
}

#[test]
fn a_device_in_use_is_not_removed_by_who_asks_for_an_unused_one() {
    let r = Registry::new();
    r.register(null("a")).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = seen.clone();
    let _sub = r.subscribe(move |e| notes.lock().push(format!("{e:?}")));
    let held = r.claim_as("a", "export e", ClaimMode::Reader).unwrap();
    let e = r.unregister_unused("a").unwrap_err();
    assert!(matches!(&e, RegistryError::Claimed { owner, .. } if owner == "export e"), "{e}");
    assert!(r.get("a").is_some() && seen.lock().is_empty());
    drop(held);
    assert_eq!(r.unregister_unused("a").unwrap().name(), "a");
    assert_eq!(*seen.lock(), ["Removed(\"a\")"]);
    assert!(matches!(r.unregister_unused("a"), Err(RegistryError::NotFound(_))));
    r.register(null("a")).unwrap();
}

#[test]
fn a_device_whose_removal_was_given_up_goes_with_its_last_holder() {
    let r = Registry::new();
    r.register(null("a")).unwrap();
    let held = [
        r.claim_as("a", "one", ClaimMode::Shared).unwrap(),
        r.claim_as("a", "two", ClaimMode::Shared).unwrap(),
    ];
    assert!(r.unregister_within("a", Duration::ZERO).is_err());
    let [one, two] = held;
    drop(one);
    assert!(r.register(null("a")).is_err(), "the second has it");
    drop(two);
    r.register(null("a")).unwrap();
    let _held = r.claim("a", "three").unwrap();
    assert!(r.get("a").is_some());
}

#[test]
fn what_shows_another_is_found_by_that_ones_name_while_it_is_there() {
    let r = Registry::new();
    r.register(null("base")).unwrap();
    assert!(r.above("base").is_none());
    let mut shown = Named::new("shown", "s/shown");
    Arc::get_mut(&mut shown).unwrap().below = Some("base");
    r.register(shown).unwrap();
    assert_eq!(r.above("base").unwrap().name(), "shown");
    assert!(r.above("shown").is_none());
    // Who hears of the base's removal finds it still.
    let (known, found) = (r.clone(), Arc::new(Mutex::new(None)));
    let its = found.clone();
    let _subscription = r.subscribe(move |event| {
        if let Event::Removed(bdev) = event {
            *its.lock() = known.above(bdev.name()).map(|above| above.name().to_owned());
        }
    });
    r.unregister("base").unwrap();
    assert_eq!(found.lock().as_deref(), Some("shown"));
    r.unregister("shown").unwrap();
    assert!(r.above("base").is_none());
}
