"""Raw events in users' formats: lossless readers, and generators with a planted truth."""
