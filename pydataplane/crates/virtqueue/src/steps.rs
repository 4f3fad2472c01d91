//! Where a process may be killed: after each store to memory that outlives it. In this crate's own
//! tests a hook looks at that memory then; otherwise there is nothing.

/// A store was made.
macro_rules! step {
    () => {
        #[cfg(test)]
        $crate::steps::made();
    };
}
pub(crate) use step;

/// Calls the hook, but not while it looks.
#[cfg(test)]
pub(crate) fn made() {
    if let Some(mut hook) = HOOK.take() {
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
