"""What a run tells of itself while it goes on: who was busy when, who waits for whom, what actors printed."""
