"""The fields of the objects that training needs, with their types. Names are Kubernetes' own.

Read from the API of Kubernetes 1.37, Training Operator 1.9, Trainer 2.3, JobSet 0.12, Volcano 1.12
and scheduler-plugins 0.31. Each line of the table is a shape: `name=type`, `name!=type` where the
field must be given. A type is a shape, `[T]` a list, `{T}` a mapping, `A|B` one of these words
(`~` is the empty one), or one of `any`, `bool`, `int`, `nat` (0 or more), `pos` (1 or more),
`port` (a number or a name), `quantity`, `str`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["KINDS", "Field", "fields_of"]


@dataclass(frozen=True, kw_only=True)
class Field:
    """What may stand below a key."""

    type: str
    """Its type, as the table writes it."""

    required: bool
    """Whether a server refuses an object without it."""


KINDS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("", "ConfigMap"): ("v1", "ConfigMap"),
    ("", "Namespace"): ("v1", "Anything"),
    ("", "PersistentVolumeClaim"): ("v1", "Claim"),
    ("", "Pod"): ("v1", "Pod"),
    ("", "Secret"): ("v1", "Secret"),
    ("", "Service"): ("v1", "Service"),
    ("", "ServiceAccount"): ("v1", "ServiceAccount"),
    ("batch", "Job"): ("v1", "Job"),
    ("jobset.x-k8s.io", "JobSet"): ("v1alpha2", "JobSet"),
    ("kubeflow.org", "PyTorchJob"): ("v1", "PyTorchJob"),
    ("networking.k8s.io", "NetworkPolicy"): ("v1", "NetworkPolicy"),
    ("scheduling.volcano.sh", "PodGroup"): ("v1beta1", "VolcanoPodGroup"),
    ("scheduling.x-k8s.io", "PodGroup"): ("v1alpha1", "PodGroup"),
    ("trainer.kubeflow.org", "ClusterTrainingRuntime"): ("v1alpha1", "TrainingRuntime"),
    ("trainer.kubeflow.org", "TrainJob"): ("v1alpha1", "TrainJob"),
    ("trainer.kubeflow.org", "TrainingRuntime"): ("v1alpha1", "TrainingRuntime"),
}
"""API group and kind: the version that is served today, and the shape of the whole object."""

_SCALARS = frozenset({"any", "bool", "int", "nat", "port", "pos", "quantity", "str"})

_TABLE = """
Meta: annotations={str} creationTimestamp=any deletionGracePeriodSeconds=nat deletionTimestamp=any
  finalizers=[str] generateName=str generation=nat labels={str} managedFields=any name=str
  namespace=str ownerReferences=any resourceVersion=str selfLink=str uid=str
Anything: apiVersion!=str kind!=str metadata=Meta spec=any status=any data=any

PyTorchJob: apiVersion!=str kind!=str metadata!=Meta spec!=PyTorchJobSpec status=any
PyTorchJobSpec: elasticPolicy=Elastic nprocPerNode=any pytorchReplicaSpecs!={Replicas}
  runPolicy=RunPolicy
Elastic: maxReplicas=pos maxRestarts=nat metrics=any minReplicas=pos nProcPerNode=pos
  rdzvBackend=c10d|etcd|etcd-v2 rdzvConf=[Conf] rdzvHost=str rdzvId=str rdzvPort=pos
  standalone=bool
Conf: key=str value=str
Replicas: replicas=nat restartPolicy=Always|OnFailure|Never|ExitCode template=Template
RunPolicy: activeDeadlineSeconds=pos backoffLimit=nat cleanPodPolicy=Running|All|None managedBy=str
  schedulingPolicy=SchedulingPolicy suspend=bool ttlSecondsAfterFinished=nat
SchedulingPolicy: minAvailable=nat minResources={quantity} priorityClass=str queue=str
  scheduleTimeoutSeconds=nat

Job: apiVersion!=str kind!=str metadata!=Meta spec!=JobSpec status=any
JobSpec: activeDeadlineSeconds=pos backoffLimit=nat backoffLimitPerIndex=nat
  completionMode=Indexed|NonIndexed completions=nat managedBy=str manualSelector=bool
  maxFailedIndexes=nat parallelism=nat podFailurePolicy=PodFailures
  podReplacementPolicy=Failed|TerminatingOrFailed scheduling=any selector=Selector
  successPolicy=any suspend=bool
  template!=Template ttlSecondsAfterFinished=nat
PodFailures: rules!=[PodFailure]
PodFailure: action!=FailJob|FailIndex|Ignore|Count onExitCodes=ExitCodes onPodConditions=[Condition]
ExitCodes: containerName=str operator!=In|NotIn values!=[int]
Condition: status=True|False|Unknown type!=str

JobSet: apiVersion!=str kind!=str metadata!=Meta spec!=JobSetSpec status=any
JobSetSpec: coordinator=Coordinator failurePolicy=Failures managedBy=str network=Network
  replicatedJobs=[ReplicatedJob] startupPolicy=Startup successPolicy=Success suspend=bool
  ttlSecondsAfterFinished=nat volumeClaimPolicies=any
Coordinator: jobIndex=nat podIndex=nat replicatedJob!=str
Failures: maxRestarts=nat restartStrategy=Recreate|BlockingRecreate|InPlaceRestart rules=[Failure]
Failure: action!=FailJobSet|RestartJobSet|RestartJobSetAndIgnoreMaxRestarts|RestartJob|
  RestartJobAndIgnoreMaxRestarts name=str onJobFailureMessagePatterns=[str]
  onJobFailureReasons=[BackoffLimitExceeded|DeadlineExceeded|FailedIndexes|
  MaxFailedIndexesExceeded|PodFailurePolicy]
  targetReplicatedJobs=[str]
Network: enableDNSHostnames=bool publishNotReadyAddresses=bool subdomain=str
ReplicatedJob: dependsOn=[Depends] groupName=str name!=str replicas=nat template!=JobTemplate
Depends: name!=str status=Ready|Complete
JobTemplate: metadata=Meta spec=JobSpec
Startup: startupPolicyOrder!=AnyOrder|InOrder
Success: operator!=All|Any targetReplicatedJobs=[str]

TrainingRuntime: apiVersion!=str kind!=str metadata!=Meta spec!=RuntimeSpec status=any
RuntimeSpec: mlPolicy=MlPolicy podGroupPolicy=any template!=JobSetTemplate
MlPolicy: flux=any jax=any mpi=any numNodes=pos torch=Torch xgboost=any
Torch: envInjection=any
JobSetTemplate: metadata=Meta spec=JobSetSpec

TrainJob: apiVersion!=str kind!=str metadata!=Meta spec!=TrainJobSpec status=any
TrainJobSpec: activeDeadlineSeconds=pos initializer=any managedBy=str podTemplateOverrides=any
  runtimePatches=[Patch] runtimeRef!=RuntimeRef suspend=bool trainer=Trainer
RuntimeRef: apiGroup=str kind=TrainingRuntime|ClusterTrainingRuntime name!=str
Trainer: args=[str] command=[str] env=[Env] image=str numNodes=pos numProcPerNode=pos
  resourcesPerNode=Resources
Patch: manager!=str time=any trainingRuntimeSpec=PatchedRuntime
PatchedRuntime: template=PatchedJobSet
PatchedJobSet: metadata=Meta spec=PatchedJobSetSpec
PatchedJobSetSpec: replicatedJobs=[PatchedReplicatedJob]
PatchedReplicatedJob: name!=str template=PatchedJob
PatchedJob: metadata=Meta spec=PatchedJobSpec
PatchedJobSpec: template=PatchedPod
PatchedPod: metadata=Meta spec=PatchedPodSpec
PatchedPodSpec: affinity=Affinity containers=[PatchedContainer] imagePullSecrets=[Local]
  initContainers=[PatchedContainer] nodeSelector={str} schedulingGates=[Local]
  securityContext=PodSecurity serviceAccountName=str terminationGracePeriodSeconds=nat
  tolerations=[Toleration] volumes=[Volume]
PatchedContainer: env=[Env] image=any name!=str securityContext=Security volumeMounts=[Mount]

Pod: apiVersion!=str kind!=str metadata!=Meta spec!=PodSpec status=any
Template: metadata=Meta spec=PodSpec
PodSpec: activeDeadlineSeconds=pos affinity=Affinity automountServiceAccountToken=bool
  containers!=[Container] dnsConfig=DnsConfig
  dnsPolicy=ClusterFirst|ClusterFirstWithHostNet|Default|None enableServiceLinks=bool
  ephemeralContainers=any evictionResponders=any hostAliases=[HostAlias] hostIPC=bool
  hostNetwork=bool hostPID=bool
  hostUsers=bool hostname=str hostnameOverride=str imagePullSecrets=[Local]
  initContainers=[Container] nodeName=str nodeSelector={str} os=Os overhead={quantity}
  preemptionPolicy=Never|PreemptLowerPriority priority=int priorityClassName=str
  readinessGates=any resourceClaims=any resources=Resources restartPolicy=Always|OnFailure|Never
  runtimeClassName=str schedulerName=str schedulingGates=[Local] schedulingGroup=any
  securityContext=PodSecurity serviceAccount=str serviceAccountName=str setHostnameAsFQDN=bool
  shareProcessNamespace=bool subdomain=str terminationGracePeriodSeconds=nat
  tolerations=[Toleration] topologySpreadConstraints=[Spread] volumes=[Volume]
Os: name!=linux|windows
Local: name=str
HostAlias: hostnames=[str] ip!=str
DnsConfig: nameservers=[str] options=[Option] searches=[str]
Option: name=str value=str
Toleration: effect=NoSchedule|PreferNoSchedule|NoExecute|~ key=str operator=Exists|Equal|~
  tolerationSeconds=int value=str
Spread: labelSelector=Selector matchLabelKeys=[str] maxSkew!=pos minDomains=pos
  nodeAffinityPolicy=Honor|Ignore nodeTaintsPolicy=Honor|Ignore topologyKey!=str
  whenUnsatisfiable!=DoNotSchedule|ScheduleAnyway
Selector: matchExpressions=[Expression] matchLabels={str}
Expression: key!=str operator!=In|NotIn|Exists|DoesNotExist values=[str]
Affinity: nodeAffinity=NodeAffinity podAffinity=PodAffinity podAntiAffinity=PodAffinity
NodeAffinity: preferredDuringSchedulingIgnoredDuringExecution=[PreferredNodes]
  requiredDuringSchedulingIgnoredDuringExecution=NodeTerms
PreferredNodes: preference!=NodeTerm weight!=pos
NodeTerms: nodeSelectorTerms!=[NodeTerm]
NodeTerm: matchExpressions=[NodeExpression] matchFields=[NodeExpression]
NodeExpression: key!=str operator!=In|NotIn|Exists|DoesNotExist|Gt|Lt values=[str]
PodAffinity: preferredDuringSchedulingIgnoredDuringExecution=[PreferredPods]
  requiredDuringSchedulingIgnoredDuringExecution=[PodTerm]
PreferredPods: podAffinityTerm!=PodTerm weight!=pos
PodTerm: labelSelector=Selector matchLabelKeys=[str] mismatchLabelKeys=[str]
  namespaceSelector=Selector namespaces=[str] topologyKey!=str

Container: args=[str] command=[str] env=[Env] envFrom=[EnvFrom] image=str
  imagePullPolicy=Always|IfNotPresent|Never lifecycle=any livenessProbe=any name!=str ports=[Port]
  readinessProbe=any resizePolicy=any resources=Resources restartPolicy=Always|OnFailure|Never
  restartPolicyRules=any securityContext=Security startupProbe=any stdin=bool stdinOnce=bool
  terminationMessagePath=str terminationMessagePolicy=File|FallbackToLogsOnError tty=bool
  volumeDevices=[Device] volumeMounts=[Mount] workingDir=str
Env: name!=str value=str valueFrom=ValueFrom
ValueFrom: configMapKeyRef=KeyRef fieldRef=FieldRef fileKeyRef=any
  resourceFieldRef=ResourceFieldRef secretKeyRef=KeyRef
KeyRef: key!=str name=str optional=bool
FieldRef: apiVersion=str fieldPath!=str
ResourceFieldRef: containerName=str divisor=quantity resource!=str
EnvFrom: configMapRef=Ref prefix=str secretRef=Ref
Ref: name=str optional=bool
Port: containerPort!=any hostIP=str hostPort=any name=any protocol=TCP|UDP|SCTP
Resources: claims=any limits={quantity} requests={quantity}
Device: devicePath!=str name!=str
Mount: bindMountOptions=any mountPath!=str mountPropagation=None|HostToContainer|Bidirectional
  name!=str readOnly=bool recursiveReadOnly=Disabled|IfPossible|Enabled subPath=str subPathExpr=str
Security: allowPrivilegeEscalation=bool appArmorProfile=Profile capabilities=Capabilities
  privileged=bool procMount=Default|Unmasked readOnlyRootFilesystem=bool runAsGroup=nat
  runAsNonRoot=bool runAsUser=nat seLinuxOptions=any seccompProfile=Profile windowsOptions=any
PodSecurity: appArmorProfile=Profile fsGroup=nat fsGroupChangePolicy=OnRootMismatch|Always
  runAsGroup=nat runAsNonRoot=bool runAsUser=nat seLinuxChangePolicy=MountOption|Recursive
  seLinuxOptions=any seccompProfile=Profile supplementalGroups=[int]
  supplementalGroupsPolicy=Merge|Strict sysctls=[Sysctl] windowsOptions=any
Profile: localhostProfile=str type!=RuntimeDefault|Localhost|Unconfined
Capabilities: add=[str] drop=[str]
Sysctl: name!=str value!=str

Volume: awsElasticBlockStore=any azureDisk=any azureFile=any cephfs=any cinder=any
  configMap=ConfigMapVolume csi=Csi downwardAPI=any emptyDir=EmptyDir ephemeral=any fc=any
  flexVolume=any flocker=any gcePersistentDisk=any gitRepo=any glusterfs=any hostPath=HostPath
  image=ImageVolume iscsi=any name!=str nfs=Nfs persistentVolumeClaim=ClaimVolume
  photonPersistentDisk=any portworxVolume=any projected=any quobyte=any rbd=any scaleIO=any
  secret=SecretVolume storageos=any vsphereVolume=any
ConfigMapVolume: defaultMode=nat defaultUser=any items=[Item] name=str optional=bool
SecretVolume: defaultMode=nat defaultUser=any items=[Item] optional=bool secretName=str
Item: key!=str mode=nat path!=str
Csi: driver!=str fsType=str nodePublishSecretRef=Local readOnly=bool volumeAttributes={str}
EmptyDir: medium=Memory|HugePages|HugePages-2Mi|HugePages-1Gi|~ mode=any sizeLimit=quantity
HostPath: path!=str
  type=DirectoryOrCreate|Directory|FileOrCreate|File|Socket|CharDevice|BlockDevice|~
ImageVolume: pullPolicy=Always|IfNotPresent|Never reference=str
Nfs: path!=str readOnly=bool server!=str
ClaimVolume: claimName!=str readOnly=bool

Service: apiVersion!=str kind!=str metadata!=Meta spec!=ServiceSpec status=any
ServiceSpec: allocateLoadBalancerNodePorts=bool clusterIP=str clusterIPs=[str] externalIPs=[str]
  externalName=str externalTrafficPolicy=Cluster|Local healthCheckNodePort=nat
  internalTrafficPolicy=Cluster|Local ipFamilies=[IPv4|IPv6]
  ipFamilyPolicy=SingleStack|PreferDualStack|RequireDualStack loadBalancerClass=str
  loadBalancerIP=str loadBalancerSourceRanges=[str] ports=[ServicePort]
  publishNotReadyAddresses=bool selector={str} sessionAffinity=ClientIP|None
  sessionAffinityConfig=any trafficDistribution=str
  type=ClusterIP|NodePort|LoadBalancer|ExternalName
ServicePort: appProtocol=str name=any nodePort=any port!=any protocol=TCP|UDP|SCTP targetPort=any

NetworkPolicy: apiVersion!=str kind!=str metadata!=Meta spec=PolicySpec status=any
PolicySpec: egress=[Egress] ingress=[Ingress] podSelector=Selector policyTypes=[Ingress|Egress]
Ingress: from=[Peer] ports=[PolicyPort]
Egress: ports=[PolicyPort] to=[Peer]
Peer: ipBlock=Block namespaceSelector=Selector podSelector=Selector
Block: cidr!=str except=[str]
PolicyPort: endPort=pos port=port protocol=TCP|UDP|SCTP

PodGroup: apiVersion!=str kind!=str metadata!=Meta spec=PodGroupSpec status=any
PodGroupSpec: minMember=nat minResources={quantity} scheduleTimeoutSeconds=nat
VolcanoPodGroup: apiVersion!=str kind!=str metadata!=Meta spec=VolcanoPodGroupSpec status=any
VolcanoPodGroupSpec: minMember=nat minResources={quantity} minTaskMember={nat} networkTopology=any
  priorityClassName=str queue=str subGroupPolicy=any

ConfigMap: apiVersion!=str binaryData={str} data={str} immutable=bool kind!=str metadata!=Meta
Secret: apiVersion!=str data={str} immutable=bool kind!=str metadata!=Meta stringData={str} type=str
ServiceAccount: apiVersion!=str automountServiceAccountToken=bool imagePullSecrets=[Local] kind!=str
  metadata!=Meta secrets=any
Claim: apiVersion!=str kind!=str metadata!=Meta spec!=ClaimSpec status=any
ClaimSpec: accessModes=[ReadWriteOnce|ReadOnlyMany|ReadWriteMany|ReadWriteOncePod] dataSource=any
  dataSourceRef=any resources=Resources selector=Selector storageClassName=str
  volumeAttributesClassName=str volumeMode=Filesystem|Block volumeName=str
"""


@functools.cache
def _shapes() -> Mapping[str, Mapping[str, Field]]:
    shapes: dict[str, dict[str, Field]] = {}
    shape: dict[str, Field] = {}
    for word in _TABLE.replace("|\n  ", "|").split():
        if word.endswith(":"):
            shape = shapes[word[:-1]] = {}
        else:
            name, _, kind = word.partition("=")
            shape[name.removesuffix("!")] = Field(type=kind, required=name.endswith("!"))
    return shapes


def fields_of(type: str) -> Mapping[str, Field] | None:
    """Return the fields of a shape; None for other values."""
    return None if type in _SCALARS else _shapes().get(type)
