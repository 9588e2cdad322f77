"""Watches a sweep and says nothing."""


class Quiet:
    def __init__(self):
        self.started = []
        self.servers = 0

    def sweep_started(self, points):
        self.planned = list(points)

    def point_started(self, point, number, total):
        self.started.append(point.key)

    def request_done(self):
        pass

    def point_finished(self, record):
        pass

    def server_starting(self, launch, log_file):
        self.servers += 1
