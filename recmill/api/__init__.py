"""The implementation of the public API. Import it from `recmill` itself: modules below are private."""
