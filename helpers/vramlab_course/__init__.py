"""The course's own code: claims, chapters' helpers and experiments; what readers reuse is in `vramlab`."""
