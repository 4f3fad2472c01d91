"""A target that is killed: nothing acknowledged is lost, nothing is half done."""
