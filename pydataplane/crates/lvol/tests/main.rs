//! The crate's tests, as one program: linked once, and one that waits leaves the processors to others.

mod common;
mod crash_lvol;
mod discard;
mod durable;
mod external;
mod fair;
mod first_write;
mod flush;
mod history;
mod lvstores;
mod maps;
mod model;
mod protected;
mod quiet;
mod reload;
mod shares;
mod shares_reload;
mod shares_room;
mod zeros;
