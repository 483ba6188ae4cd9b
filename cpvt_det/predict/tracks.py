# SPDX-License-Identifier: Apache-2.0
"""The same object over the frames of a film: ids by ByteTrack, of the package ``trackers``."""

import numpy as np

from cpvt_det.errors import BadInputError
from cpvt_det.predict.detections import ImageDetections


class Tracks:
    """Ids of objects, called frame by frame.

    Args:
        rate: frames per second.
        threshold: score from which an object that is not known gets an id; lower ones only continue a track.

    Raises:
        BadInputError: the package is not installed.

    Source: ByteTrack (arXiv 2110.06864), with the defaults of ``trackers``.
    """

    def __init__(self, rate: float, threshold: float):
        try:
            from trackers import ByteTrackTracker
        except ImportError as error:
            raise BadInputError("--track needs the package trackers: pip install 'cpvt-det[track]'") from error
        scores = {"track_activation_threshold": threshold, "high_conf_det_threshold": threshold}
        self._tracker = ByteTrackTracker(frame_rate=rate, **scores)

    def __call__(self, found: ImageDetections) -> list[int | None]:
        """The id of each detection of the next frame; ``None`` for what belongs to no track, or not yet."""
        given = found.to_supervision()
        given.data["index"] = np.arange(len(found))  # the answer may have another order
        tracked = self._tracker.update(given)
        pairs = zip(tracked.data.get("index", ()), () if tracked.tracker_id is None else tracked.tracker_id, strict=True)
        ids = {int(index): int(number) for index, number in pairs if number >= 0}
        return [ids.get(index) for index in range(len(found))]
