"""Output for people: progress, tracking, HTML reports, machine facts."""
