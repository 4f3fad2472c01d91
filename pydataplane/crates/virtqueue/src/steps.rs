//! Where a process may be killed: after each store to memory that outlives it. In this crate's own
//! tests a hook looks at that memory then; otherwise this is nothing.

/// A store was made.
#[inline(always)]
pub(crate) fn step() {
    #[cfg(test)]
    if let Some(mut hook) = HOOK.take() {
        // Not while it looks.
        hook();
        HOOK.set(Some(hook));
    }
}

#[cfg(test)]
thread_local! {
    static HOOK: std::cell::RefCell<Option<Box<dyn FnMut()>>> =
        const { std::cell::RefCell::new(None) };
}

/// Calls `hook` after each store of this thread from now on.
#[cfg(test)]
pub(crate) fn watch(hook: impl FnMut() + 'static) {
    HOOK.set(Some(Box::new(hook)));
}

/// Calls it no more.
#[cfg(test)]
pub(crate) fn forget() {
    HOOK.set(None);
}
