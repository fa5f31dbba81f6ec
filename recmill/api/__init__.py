"""What `recmill` offers to Python programs. Import it from `recmill` itself: modules below are private."""
