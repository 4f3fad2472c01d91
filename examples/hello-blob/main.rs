//! The blobstore in one page, after the hello-blob walk-through of SDC 2017: make a store, create a
//! blob, write, set an xattr, sync; open it again, read it back; take a snapshot, delete both.
//!
//! ```text
//! cargo run -p blobstore --example hello-blob                # in a temporary file
//! cargo run -p blobstore --example hello-blob -- /dev/sdX    # DESTROYS what is on /dev/sdX
//! ```

use blobstore::{BlobOptions, FileDisk, HistoryOptions, Store, StoreOptions};
use std::fs::{File, OpenOptions};
use std::path::Path;
use uuid::Uuid;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let scratch = tempfile::NamedTempFile::new()?;
    let given = std::env::args_os().nth(1);
    let path = given.as_deref().map_or(scratch.path(), Path::new);
    if given.is_none() {
        scratch.as_file().set_len(64 << 20)?;
    }

    // 1. A store of 1 MiB clusters.
    let options =
        StoreOptions { name: "hello".into(), uuid: Uuid::new_v4(), cluster_size: 1 << 20 };
    let mut store = Store::create_store(FileDisk::new(open(path)?)?, &options)?;
    println!("created: {:?}", store.info());

    // 2. A thin blob of four clusters: nothing is allocated yet, all of it reads as zeros.
    let blob = store.create(&BlobOptions {
        dif: None,
        name: "greeting".into(),
        uuid: Uuid::new_v4(),
        size: 4,
        thin: true,
        xattrs: Default::default(),
    })?;

    // 3. Write across a cluster boundary: two clusters are allocated.
    let hello = b"hello, blob";
    let offset = (1 << 20) - 5;
    store.write(blob, offset, hello)?;
    store.set_xattr(blob, "language", b"en")?;

    // 4. Changes of the blob itself are durable when they return; its data is after a sync.
    store.sync()?;
    println!("written: {:?}", store.blob(blob)?);
    drop(store.close()?);

    // 5. Another process finds it by name.
    let mut store = Store::load(FileDisk::new(open(path)?)?)?;
    let blob = store.by_name("greeting").ok_or("the blob is gone")?;
    let mut bytes = [0; 11];
    store.read(blob, offset, &mut bytes)?;
    println!("read:    {}", String::from_utf8_lossy(&bytes));
    assert_eq!((&bytes, store.xattr(blob, "language")?), (hello, &b"en"[..]));

    // 6. A snapshot keeps what was written; the blob goes on, under another number.
    let options =
        HistoryOptions { name: "before".into(), uuid: Uuid::new_v4(), xattrs: Default::default() };
    let snapshot = blob;
    let blob = store.snapshot(&[(snapshot, options)])?[0];
    store.write(blob, offset, b"changed blob")?;
    store.read(snapshot, offset, &mut bytes)?;
    println!("before:  {}", String::from_utf8_lossy(&bytes));
    assert_eq!(&bytes, hello);
    let deleted = store.delete(snapshot)?;
    store.release(deleted.freed);

    // 7. Its clusters are free once nobody uses them any more.
    let deleted = store.delete(blob)?;
    store.release(deleted.freed);
    drop(store.close()?);
    Ok(())
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}
