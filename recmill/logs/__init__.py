"""Raw events as users have them: readers that lose nothing, and generators with a planted truth."""
