"""The migrations, run by `fencepost.store.migrate`. A migration that was released is never changed."""
