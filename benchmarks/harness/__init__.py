"""What every problem needs: how work is timed and checked, the peers, goals, records and tables."""
