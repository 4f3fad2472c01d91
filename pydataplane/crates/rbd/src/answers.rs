//! Whether a cluster answers what images of it were asked, so that one that does not can be named while guests wait.
//!
//! I/O of guests waits for its OSDs for as long as it takes, without an error; and for limits that librbd itself
//! keeps an image to, which cannot be told apart from here. A thread of each cluster looks every few seconds how long
//! the oldest has waited, and says once that it does, and once that it is over. The I/O path only notes when a call
//! begins. Monitors are asked when somebody wants to know (`monitors`): no I/O needs them.

use std::sync::{Arc, Weak, mpsc};
use std::time::Duration;

use parking_lot::Mutex;

use crate::Error;
use crate::calls::spawn;
use crate::cluster::Client;
use crate::image::Image;
use crate::monitors::Monitors;

/// How often it is looked.
const LOOK: Duration = Duration::from_secs(5);
/// From when on I/O that is not answered is worth a word.
const LONG: Duration = Duration::from_secs(5);
/// How long monitors may take.
const MONITORS: Duration = Duration::from_secs(3);

/// What looks after one cluster's answers.
#[derive(Default)]
pub(crate) struct Answers {
    images: Mutex<Vec<Weak<Image>>>,
    /// Ends the thread when it is dropped.
    looking: Mutex<Option<mpsc::Sender<()>>>,
    monitors: Arc<Monitors>,
}

/// I/O that is not answered.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Unanswered {
    /// Images that it is of.
    images: usize,
    /// The one whose I/O waits longest: pool and name.
    longest: String,
    /// How long that has waited.
    since: Duration,
}

impl Unanswered {
    fn sentence(&self) -> String {
        let Unanswered { images, longest, since } = self;
        let which = match images {
            1 => format!("image {longest}"),
            _ => format!("{images} images (the longest of {longest})"),
        };
        let seconds = since.as_secs();
        format!(
            "I/O of {which} has not been answered for {seconds} s, by its cluster or as a limit of librbd's own \
             (rbd_qos_*) holds it back, and its guests wait for it"
        )
    }
}

impl Answers {
    /// Looks after an image, too, of the cluster of that name.
    ///
    /// # Errors
    /// There is no thread.
    pub(crate) fn add(self: &Arc<Answers>, cluster: &str, image: Weak<Image>) -> Result<(), Error> {
        let mut images = self.images.lock();
        images.retain(|image| image.strong_count() > 0);
        images.push(image);
        drop(images);
        let mut looking = self.looking.lock();
        if looking.is_none() {
            let (until, ended) = mpsc::channel();
            let (this, name) = (Arc::downgrade(self), cluster.to_owned());
            spawn("rbd answers", move || look_on(&this, &name, &ended))?;
            *looking = Some(until);
        }
        Ok(())
    }

    fn unanswered(&self) -> Option<Unanswered> {
        // Not with the list locked: this may be an image's last.
        let images: Vec<_> = self.images.lock().iter().filter_map(Weak::upgrade).collect();
        let late = images.iter().filter_map(|image| {
            let since = image.hold.unanswered().filter(|since| *since >= LONG)?;
            Some((since, image.source().path()))
        });
        of_late(late)
    }

    /// What is wrong, in one sentence without its end; `None`: it answers. Waits some seconds for its monitors.
    pub(crate) fn problem(&self, client: &Arc<Client>) -> Option<String> {
        let io = self.unanswered().map(|late| late.sentence());
        let seconds = MONITORS.as_secs();
        let client = Arc::clone(client);
        let monitors = (!self.monitors.answer(MONITORS, move || client.ask_monitors()))
            .then(|| format!("its monitors have not answered within {seconds} s"));
        let all: Vec<_> = io.into_iter().chain(monitors).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}

fn of_late(late: impl Iterator<Item = (Duration, String)>) -> Option<Unanswered> {
    let all: Vec<_> = late.collect();
    let images = all.len();
    let (since, longest) = all.into_iter().max()?;
    Some(Unanswered { images, longest, since })
}

/// Looks until the cluster is gone.
fn look_on(answers: &Weak<Answers>, cluster: &str, ended: &mpsc::Receiver<()>) {
    let mut said = false;
    while let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(LOOK) {
        let Some(answers) = answers.upgrade() else { return };
        match answers.unanswered() {
            Some(late) if !said => {
                said = true;
                tracing::error!(
                    "images of cluster {cluster} wait: {}; `ceph -s` says what the cluster lacks",
                    late.sentence()
                );
            }
            None if said => {
                said = false;
                tracing::info!(
                    "images of cluster {cluster} go on: none of their I/O waits any more"
                );
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_that_waits_longest_is_named() {
        let of = |seconds, name: &str| (Duration::from_secs(seconds), name.to_owned());
        assert_eq!(of_late([].into_iter()), None);
        let one = of_late([of(7, "rbd/a")].into_iter()).unwrap().sentence();
        let text = "has not been answered for 7 s, by its cluster or as a limit of librbd's own (rbd_qos_*) \
                    holds it back, and its guests wait for it";
        assert_eq!(one, format!("I/O of image rbd/a {text}"));
        let two = of_late([of(6, "rbd/b"), of(7, "rbd/a")].into_iter()).unwrap().sentence();
        assert_eq!(two, format!("I/O of 2 images (the longest of rbd/a) {text}"));
    }
}
