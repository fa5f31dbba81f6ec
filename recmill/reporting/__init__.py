"""What people look at: progress, tracking, HTML reports, facts about the machine."""
