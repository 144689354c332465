"""What keeps the fleet in order beside the work itself: sweep, reconcile, notices. Runs in beat; needs no worker."""
