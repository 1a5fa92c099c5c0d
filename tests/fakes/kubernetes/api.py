"""The verbs of the API server, for every resource of the table."""

import copy
import re
from collections.abc import Callable, Iterator

from tests.fakes.kubernetes.admission import admit_create, admit_update
from tests.fakes.kubernetes.applying import Ownership
from tests.fakes.kubernetes.checking import checked
from tests.fakes.kubernetes.discovery import discover
from tests.fakes.kubernetes.patching import patched
from tests.fakes.kubernetes.quantities import with_canonical_quantities
from tests.fakes.kubernetes.reading import Reading, chosen
from tests.fakes.kubernetes.resources import Resource, of_kind, served
from tests.fakes.kubernetes.wire import Answer, Object, Query, Refusal, Request, status_object

__all__ = ["Api"]

_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/(?!status$|finalize$)))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>status|log|scale|eviction|exec))?"
)
_NOT_FOUND = 404, "404 page not found\n"
_DONE = status_object(200, "", "", word="Success")


class Api(Reading):
    """Answers requests."""

    def __init__(self, *, namespaces: tuple[str, ...], without: tuple[str, ...]) -> None:
        super().__init__(namespaces=namespaces, without=without)
        self.requests: list[tuple[str, str, Query]] = []
        """Every request so far: method, path, query."""
        self.deny: dict[str, str] = {}
        """Kinds that a webhook refuses, and its words."""
        self.tokens: set[str] | None = None
        """Accepted bearer tokens; None accepts every request."""
        self._forbidden: set[tuple[str, str]] = set()
        self._owners: dict[str, Ownership] = {}

    def forbid(self, resource: str, *verbs: str) -> None:
        """Take rights away: `forbid("pods/log", "get")`; all verbs where none is named."""
        names = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
        self._forbidden |= {(resource, verb) for verb in verbs or names}

    def answer(self, request: Request) -> Answer:
        """Answer a request; a stream of bytes for watches and followed logs. Takes the lock."""
        try:
            if self.tokens is not None and request.token not in self.tokens:
                raise Refusal(401, "Unauthorized", "Unauthorized")
            with self.changed:
                status, answer = self._route(request)
                self.settle()
                return status, answer if isinstance(answer, Iterator) else copy.deepcopy(answer)
        except Refusal as refusal:
            return refusal.answer

    def _route(self, request: Request) -> Answer:
        if (found := discover(request.path, self.missing)) is not None:
            return 200, found
        if request.path.endswith("/selfsubjectaccessreviews") and request.method == "POST":
            return 201, self._review(request.body)
        match = _PATH.fullmatch(request.path)
        group, version = (match["group"] or "", match["version"] or "v1") if match else ("", "")
        resource = served(group, version, match["plural"]) if match else None
        if match is None or resource is None or not self.is_served(resource.group):
            return _NOT_FOUND
        namespace, name, sub = match["namespace"], match["name"], match["sub"]
        if resource.kind == "Namespace" and namespace is not None:
            return _NOT_FOUND
        verb = self._verb(request, name)
        self._authorize(verb, resource, sub, namespace, name)
        api_version = f"{group}/{version}" if group else version
        status, answer = self._do(verb, request, resource, namespace or "", name, sub)
        if isinstance(answer, dict) and api_version != resource.api_version:
            answer = {k: v for k, v in answer.items() if k != "apiVersion"} | (
                {"apiVersion": api_version} if answer.get("kind") != "Status" else {}
            )
        return status, answer

    def _verb(self, request: Request, name: str | None) -> str:
        watching = request.is_on("watch")
        single = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
        many = {
            "GET": "watch" if watching else "list",
            "POST": "create",
            "DELETE": "deletecollection",
        }
        if name is not None and watching:
            return "watch"
        if request.method == "POST":
            return "create"
        verb = (single if name else many).get(request.method)
        if verb is None:
            words = "the server does not allow this method on the requested resource"
            raise Refusal(405, "MethodNotAllowed", words)
        return verb

    def _authorize(
        self,
        verb: str,
        resource: Resource,
        sub: str | None,
        namespace: str | None,
        name: str | None,
    ) -> None:
        plural = f"{resource.plural}/{sub}" if sub else resource.plural
        if {(plural, verb), (f"{plural}.{resource.group}", verb)} & self._forbidden:
            what = f'{resource.full} "{name}"' if name else resource.full
            raise Refusal(
                403,
                "Forbidden",
                f'{what} is forbidden: User "fake" cannot {verb} resource "{plural}" in API group '
                f'"{resource.group}" in the namespace "{namespace}"',
            )

    def _review(self, body: Object) -> Object:
        asked = body["spec"].get("resourceAttributes", {})
        plural = "/".join(filter(None, [asked.get("resource", ""), asked.get("subresource", "")]))
        pairs = {(p, asked.get("verb")) for p in (plural, f"{plural}.{asked.get('group', '')}")}
        return body | {"status": {"allowed": not pairs & self._forbidden}}

    def _do(
        self,
        verb: str,
        request: Request,
        resource: Resource,
        namespace: str,
        name: str | None,
        sub: str | None,
    ) -> Answer:
        if verb == "list":
            return 200, self.listed(resource, namespace or None, request)
        if verb == "watch":
            if name:
                request.query = dict(request.query) | {"fieldSelector": f"metadata.name={name}"}
            return 200, self.watched(resource, namespace or None, request)
        if verb == "deletecollection":
            for thing in self.all(resource, namespace or None):
                if chosen(thing, request.query):
                    self._delete(resource, thing, request)
            return 200, _DONE
        if name is None:
            return 201, self._create(resource, namespace, request)
        if sub == "log":
            return 200, self.log_lines(self.get(resource, namespace, name), request)
        if sub == "exec":
            return 101, self.exec_in(self.get(resource, namespace, name), request)
        if sub == "eviction":
            self.disrupt(self.get(resource, namespace, name), "EvictionByEvictionAPI")
            return 201, _DONE
        if verb == "get":
            return 200, self.get(resource, namespace, name)
        if verb == "update":
            return 200, self._update(resource, namespace, name, request, sub)
        if verb == "patch":
            return self._patch(resource, namespace, name, request, sub)
        return 200, self._delete(resource, self.get(resource, namespace, name), request)

    def log_lines(self, pod: Object, request: Request) -> Iterator[bytes]:
        """Return the log of a pod's container."""
        raise NotImplementedError

    def exec_in(self, pod: Object, request: Request) -> Callable[..., None]:
        """Return the function that runs a command in a pod's container over the request's
        connection."""
        raise NotImplementedError

    def disrupt(self, pod: Object, reason: str) -> None:
        """Take a pod from its node."""
        raise NotImplementedError

    # Writing.

    def _create(self, resource: Resource, namespace: str, request: Request) -> Object:
        body = self._decoded(resource, namespace, request)
        metadata = body["metadata"]
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = f"{metadata['generateName']}{self.next_id():05x}"
        return self._store_new(resource, namespace, body, request)

    def _store_new(
        self, resource: Resource, namespace: str, body: Object, request: Request
    ) -> Object:
        body = checked(self, resource, body, request)
        for key in ("resourceVersion", "uid", "creationTimestamp", "generation"):
            body["metadata"].pop(key, None)
        if resource.status:
            body.pop("status", None)
        if (words := self.deny.get(resource.kind)) is not None:
            raise Refusal(403, "Forbidden", words)
        admit_create(self, resource, body)
        if self.find(resource, namespace, body["metadata"]["name"]) is not None:
            name = body["metadata"]["name"]
            raise Refusal(
                409,
                "AlreadyExists",
                f'{resource.full} "{name}" already exists',
                {"name": name, "group": resource.group, "kind": resource.plural},
            )
        if "dryRun" in request.query:
            return body | {"metadata": body["metadata"] | {"uid": "00000000-0000-0000-0000-0"}}
        self.prepare(resource, body)
        body = with_canonical_quantities(body)
        return self.put(resource, body)

    def prepare(self, resource: Resource, body: Object, before: Object | None = None) -> None:
        """Change an object that is being made, or changed from `before`, as webhooks do."""

    def _decoded(self, resource: Resource, namespace: str, request: Request) -> Object:
        body = request.body
        if not isinstance(body, dict) or not isinstance(body.get("metadata", {}), dict):
            raise Refusal(400, "BadRequest", "the body is no object")
        body = copy.deepcopy(body)
        groups = {f"{resource.group}/{v}" if resource.group else v for v in resource.versions}
        kind, version = body.setdefault("kind", resource.kind), body.get("apiVersion")
        if kind != resource.kind or (version or resource.api_version) not in groups:
            words = f"the API version or kind in the data ({version}, {kind}) is not expected here"
            raise Refusal(400, "BadRequest", words)
        body["apiVersion"] = resource.api_version
        metadata = body.setdefault("metadata", {})
        if resource.namespaced:
            if self.find(of_kind("Namespace"), "", namespace) is None:
                raise Refusal(404, "NotFound", f'namespaces "{namespace}" not found')
            if metadata.setdefault("namespace", namespace) != namespace:
                raise Refusal(
                    400,
                    "BadRequest",
                    "the namespace of the provided object does not match the namespace sent on "
                    "the request",
                )
        return body

    def _update(
        self, resource: Resource, namespace: str, name: str, request: Request, sub: str | None
    ) -> Object:
        body = self._decoded(resource, namespace, request)
        if body["metadata"].setdefault("name", name) != name:
            raise Refusal(400, "BadRequest", f"the name of the object does not match {name!r}")
        return self._replace(resource, self.get(resource, namespace, name), body, request, sub)

    def _replace(
        self, resource: Resource, found: Object, body: Object, request: Request, sub: str | None
    ) -> Object:
        name = found["metadata"]["name"]
        wanted = body["metadata"].get("resourceVersion") or found["metadata"]["resourceVersion"]
        if wanted != found["metadata"]["resourceVersion"]:
            raise Refusal(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on {resource.full} "{name}": the object has been '
                "modified; please apply your changes to the latest version and try again",
            )
        if body["metadata"].get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
            words = f'Operation cannot be fulfilled on {resource.full} "{name}": Precondition'
            raise Refusal(409, "Conflict", f"{words} failed: UID in object meta")
        if sub == "status":
            body = copy.deepcopy(found) | {"status": body.get("status", {})}
        else:
            body = checked(self, resource, body, request)
            if resource.status and "status" in found:
                body["status"] = copy.deepcopy(found["status"])
            elif resource.status:
                body.pop("status", None)
        metadata = body["metadata"]
        for key in ("uid", "creationTimestamp", "generation", "deletionTimestamp", "namespace"):
            if key in found["metadata"]:
                metadata[key] = found["metadata"][key]
        metadata["resourceVersion"] = found["metadata"]["resourceVersion"]
        if sub != "status":
            self.prepare(resource, body, found)
            admit_update(self, resource, found, body)
        if "dryRun" in request.query:
            return body
        if body.get("spec") != (canonical := with_canonical_quantities(body)).get("spec"):
            # What was sent differs from what is stored, though it means the same: a change.
            canonical["metadata"]["generation"] = found["metadata"].get("generation", 0) + 1
        body, metadata = canonical, canonical["metadata"]
        self._owners.setdefault(metadata["uid"], Ownership()).changed(
            _manager(request), found, body
        )
        stored = self.put(resource, body)
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            self.drop(resource, stored)
        return stored

    def _patch(
        self, resource: Resource, namespace: str, name: str, request: Request, sub: str | None
    ) -> Answer:
        found = self.find(resource, namespace, name)
        if request.content_type == "application/apply-patch+yaml":
            return self._apply(resource, namespace, name, request, sub)
        found = self.get(resource, namespace, name)
        body = patched(found, request.body, request.content_type)
        if body["metadata"].get("name") != name:
            raise Refusal(422, "Invalid", "metadata.name: Invalid value: field is immutable")
        return 200, self._replace(resource, found, body, request, sub)

    def _apply(
        self, resource: Resource, namespace: str, name: str, request: Request, sub: str | None
    ) -> Answer:
        """Apply on the server's side; managers that disagree about a field get a conflict."""
        manager = request.query.get("fieldManager")
        if not manager:
            words = "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: "
            raise Refusal(422, "Invalid", f"{words}is required for apply patch")
        body = self._decoded(resource, namespace, request)
        if "managedFields" in body["metadata"]:
            raise Refusal(400, "BadRequest", "metadata.managedFields must be nil")
        if body["metadata"].setdefault("name", name) != name:
            raise Refusal(400, "BadRequest", f"the name of the object does not match {name!r}")
        found = self.find(resource, namespace, name)
        if found is None:
            stored = self._store_new(resource, namespace, copy.deepcopy(body), request)
            if "dryRun" not in request.query:
                owners = self._owners.setdefault(stored["metadata"]["uid"], Ownership())
                owners.apply(manager, {}, body, force=True, resource=resource)
            return 201, stored
        owners = self._owners.setdefault(found["metadata"]["uid"], Ownership())
        owners = copy.deepcopy(owners) if "dryRun" in request.query else owners
        force = request.is_on("force")
        merged = owners.apply(manager, found, body, force=force, resource=resource)
        return 200, self._replace(resource, found, merged, request, sub)

    def _delete(self, resource: Resource, thing: Object, request: Request) -> Object:
        options, metadata = request.body or {}, thing["metadata"]
        for key, wanted in (options.get("preconditions") or {}).items():
            if wanted is not None and wanted != metadata[key]:
                label = {"uid": "UID", "resourceVersion": "ResourceVersion"}[key]
                raise Refusal(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on {resource.full} "{metadata["name"]}": '
                    f"Precondition failed: {label} in precondition: {wanted}, {label} in object "
                    f"meta: {metadata[key]}",
                )
        query = request.query
        propagation = options.get("propagationPolicy") or query.get("propagationPolicy")
        grace = options.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
        if "dryRun" in query or options.get("dryRun"):
            return thing
        # A Job's own default is Orphan, which the API keeps for batch/v1 as Background.
        self.remove(
            resource,
            thing,
            propagation=propagation or "Background",
            grace_s=None if grace is None else float(grace),
        )
        still = self.find(resource, metadata.get("namespace", ""), metadata["name"])
        return thing if still is not None or resource.kind == "Pod" else _DONE


def _manager(request: Request) -> str:
    return request.query.get("fieldManager") or request.agent.partition("/")[0] or "unknown"
