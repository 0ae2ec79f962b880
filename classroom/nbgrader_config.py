"""nbgrader for this course, for the teacher and for the students: the file the tests use.

`make release` puts it into the course's folder. On a hub it lies beside jupyterhub_config.py, which has every server look there.

KVLAB_COURSE      the course's folder; by default the folder one is in
KVLAB_COURSE_ID   its name in the exchange; by default shared-state
KVLAB_EXCHANGE    the exchange: a folder everybody may write to (chmod 777), read by everybody's server
"""

import os
from pathlib import Path

c = get_config()  # noqa: F821

course = Path(os.environ.get("KVLAB_COURSE", ".")).absolute()
c.CourseDirectory.root = str(course)
c.CourseDirectory.course_id = os.environ.get("KVLAB_COURSE_ID", "shared-state")
c.Exchange.root = os.environ.get("KVLAB_EXCHANGE", "/srv/nbgrader/exchange")

# A score comes from outside of what a student can touch: see kvlab/classroom/nbgrader.py.
c.Autograde.sanitize_preprocessors = [
    "nbgrader.preprocessors.ClearOutput",
    "kvlab.classroom.nbgrader.Restore",
    "nbgrader.preprocessors.CheckCellMetadata",
]
c.Autograde.autograde_preprocessors = [
    "kvlab.classroom.nbgrader.Grade",
    "nbgrader.preprocessors.LimitOutput",
    "nbgrader.preprocessors.SaveAutoGrades",
    "nbgrader.preprocessors.AssignLatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
]
c.Grade.secret_file = str(course / ".grading-secret")
c.Grade.seconds = 20.0

# A submission in somebody else's name counts for whoever made it. Needs students who are users of the system.
c.ExchangeFactory.collect = "kvlab.classroom.nbgrader.Collect"
