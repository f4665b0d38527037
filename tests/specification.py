"""kube-proxy's interface by name, and the tests that cover each name.

Tests are named by file below this folder and function. `unit/test_specification.py` compares the table with recorded
responses of kube-proxy and with the program.
"""

from typing import NamedTuple

_AGENT = "unit/agent/test_"
_CONFIG = "unit/config/test_"
_SYSTEM = "system/test_"

# A value by flag equals the value by field, and differs from the default.
_SAME = f"{_CONFIG}flags_are_fields.py::test_flag_and_field_mean_the_same"
_FLAGZ = f"{_CONFIG}config_views.py::test_flagz_is_as_recorded"
_CONFIGZ = f"{_CONFIG}config_views.py::test_configz_is_as_recorded"
_AS_GIVEN = f"{_CONFIG}values_as_kube_proxy.py::test_values_are_shown_as_given"
_GATED = f"{_AGENT}pages.py::test_feature_gates_turn_pages_off"
_ATTRIBUTES = f"{_CONFIG}config_file.py::test_fields_reach_their_attributes"
_NO_EFFECT = f"{_CONFIG}config_file.py::test_settings_without_effect_are_kept"
_BESIDE_A_FILE = f"{_CONFIG}config_flags.py::test_beside_a_file_some_flags_win"
_PORTS = f"{_CONFIG}config_flags.py::test_the_deprecated_ports"
_USED_PORTS = f"{_CONFIG}config_flags.py::test_a_deprecated_port_is_checked_where_it_counts"
_STAY = f"{_CONFIG}config_flags.py::test_flags_without_an_address_leave_the_servers_at_their_defaults"
# What kube-proxy takes and refuses, by field and by flag.
_TAKEN = f"{_CONFIG}values_as_kube_proxy.py::test_a_field_that_kube_proxy_takes_is_taken"
_REFUSED = f"{_CONFIG}values_as_kube_proxy.py::test_a_field_that_kube_proxy_refuses_is_refused"
_TAKEN_FLAG = f"{_CONFIG}values_as_kube_proxy.py::test_a_flag_that_kube_proxy_takes_is_taken"
_REFUSED_FLAG = f"{_CONFIG}values_as_kube_proxy.py::test_a_flag_that_kube_proxy_refuses_is_refused"
_VALUES = (_TAKEN, _REFUSED, _TAKEN_FLAG, _REFUSED_FLAG)
_CANONICAL = f"{_CONFIG}values_as_kube_proxy.py::test_values_are_in_canonical_form"
_OTHER_MODE = f"{_CONFIG}values_as_kube_proxy.py::test_values_for_another_mode_are_kept_as_they_are"
_PERIODS = f"{_CONFIG}config_flags.py::test_a_period_of_zero_is_refused"
_RULES = f"{_SYSTEM}run_settings.py::test_each_flag_changes_its_rule"
_KERNEL = "kernel/test_node_setup.py::test_a_second_setup_changes_no_setting"
_TABLE_SIZE = f"{_AGENT}node_setup.py::test_table_size"
_KUBEADM = f"{_SYSTEM}run_actions.py::test_kubeadms_file_works_unchanged"
_HARD_FAIL = f"{_SYSTEM}agent_observed.py::test_an_address_in_use_ends_the_process_with_hard_fail"
_SERVERS = f"{_AGENT}observers.py::test_an_unspecified_address_means_both_families"
_SERVERS_OFF = f"{_AGENT}observers.py::test_port_0_disables_the_server"


class Setting(NamedTuple):
    """A flag, the equivalent field, and their tests; flag or field may be empty."""

    flag: str
    field: str
    tests: tuple[str, ...]


def _row(flag: str, field: str, *tests: str) -> Setting:
    return Setting(flag, field, tests)


SETTINGS = (
    _row(
        "config",
        "",
        "unit/cli/test_flags_options.py::test_config_file",
        f"{_CONFIG}config_errors.py::test_a_file_that_is_no_configuration_is_refused",
        f"{_CONFIG}config_warnings.py::test_a_further_document_is_a_warning",
        f"{_CONFIG}values_as_kube_proxy.py::test_a_fraction_in_json_is_no_whole_number",
        f"{_SYSTEM}agent_config_file.py::test_a_changed_file_ends_the_process",
    ),
    _row(
        "kubeconfig",
        "clientConnection.kubeconfig",
        _SAME,
        _KUBEADM,
        "unit/sources/test_kubeconfig.py::test_mistakes_that_client_go_refuses_are_refused",
        "unit/sources/test_kubeconfig.py::test_a_server_without_a_scheme_gets_https_with_settings_for_tls",
        "unit/sources/test_proxies.py::test_no_proxy_excludes_as_in_go",
        "unit/sources/test_proxies.py::test_localhost_and_loopback_addresses_have_no_proxy",
        f"{_SYSTEM}sources_proxies.py::test_no_proxy_does_not_exclude_the_proxy_of_the_kubeconfig",
        f"{_SYSTEM}sources_proxies.py::test_a_socks_proxy_is_used",
        f"{_SYSTEM}sources_proxies.py::test_each_request_names_the_user_to_impersonate",
        f"{_SYSTEM}run_settings.py::test_an_unverified_server_is_one_log_line",
        f"{_SYSTEM}faults_api_server.py::test_an_outage_is_one_log_line_and_its_end_another",
    ),
    _row(
        "master",
        "",
        _BESIDE_A_FILE,
        "unit/sources/test_credentials.py::test_master_wins",
        "unit/sources/test_kubeconfig.py::test_the_url_of_a_server",
    ),
    _row(
        "kube-api-qps",
        "clientConnection.qps",
        _SAME,
        *_VALUES,
        f"{_CONFIG}values_as_kube_proxy.py::test_a_negative_rate_is_no_limit",
        f"{_SYSTEM}run_settings.py::test_requests_are_rate_limited",
    ),
    _row(
        "kube-api-burst",
        "clientConnection.burst",
        _SAME,
        *_VALUES,
        f"{_SYSTEM}run_settings.py::test_requests_are_rate_limited",
    ),
    _row("kube-api-content-type", "clientConnection.contentType", _SAME),
    _row("", "clientConnection.acceptContentTypes", _ATTRIBUTES),
    _row("hostname-override", "hostnameOverride", _SAME, _BESIDE_A_FILE, _KUBEADM),
    _row(
        "bind-address",
        "bindAddress",
        _SAME,
        _RULES,
        "unit/rules/test_context.py::test_bind_address_overrides_the_node_address",
        f"{_CONFIG}config_file.py::test_an_ipv6_bind_address_moves_the_servers",
        _STAY,
        *_VALUES,
        _CANONICAL,
    ),
    _row("healthz-bind-address", "healthzBindAddress", _SAME, _SERVERS, _STAY, *_VALUES),
    _row("metrics-bind-address", "metricsBindAddress", _SAME, _SERVERS, _STAY),
    _row("healthz-port", "", _PORTS, _USED_PORTS, _SERVERS_OFF),
    _row("metrics-port", "", _PORTS, _SERVERS_OFF),
    _row("bind-address-hard-fail", "bindAddressHardFail", _SAME, _HARD_FAIL),
    _row("profiling", "enableProfiling", _SAME),
    _row("show-hidden-metrics-for-version", "showHiddenMetricsForVersion", _SAME, *_VALUES),
    _row(
        "proxy-mode",
        "mode",
        "unit/cli/test_flags_options.py::test_config_file",
        f"{_CONFIG}config_errors.py::test_an_impossible_value_is_refused",
    ),
    _row("iptables-masquerade-bit", "iptables.masqueradeBit", _SAME, _RULES),
    _row("masquerade-all", "iptables.masqueradeAll", _SAME, _RULES),
    _row(
        "iptables-localhost-nodeports",
        "iptables.localhostNodePorts",
        _SAME,
        _RULES,
        f"{_AGENT}loopback.py::test_node_ports_on_loopback",
    ),
    _row(
        "iptables-sync-period",
        "iptables.syncPeriod",
        _SAME,
        _PERIODS,
        *_VALUES,
        f"{_AGENT}loop.py::test_a_flushed_table_is_repaired_within_sync_period",
        f"{_AGENT}health.py::test_an_overdue_sync_is_not_ready_but_alive",
    ),
    _row(
        "iptables-min-sync-period",
        "iptables.minSyncPeriod",
        _SAME,
        f"{_AGENT}loop.py::test_changes_within_min_sync_period_are_coalesced",
    ),
    _row(
        "detect-local-mode",
        "detectLocalMode",
        _SAME,
        _RULES,
        f"{_SYSTEM}agent_node.py::test_pod_cidrs_are_awaited_and_followed",
    ),
    _row("cluster-cidr", "clusterCIDR", _SAME, _RULES, *_VALUES, _CANONICAL, _OTHER_MODE),
    _row("pod-bridge-interface", "detectLocal.bridgeInterface", _SAME, _RULES, _TAKEN, _TAKEN_FLAG),
    _row(
        "pod-interface-name-prefix",
        "detectLocal.interfaceNamePrefix",
        _SAME,
        _RULES,
        _TAKEN,
        _TAKEN_FLAG,
        _OTHER_MODE,
    ),
    _row(
        "nodeport-addresses",
        "nodePortAddresses",
        _SAME,
        _RULES,
        *_VALUES,
        _CANONICAL,
        f"{_AGENT}healthchecks.py::test_hosts_follow_node_port_addresses",
    ),
    _row("oom-score-adj", "oomScoreAdj", _SAME, _KERNEL),
    _row("conntrack-max-per-core", "conntrack.maxPerCore", _SAME, _TABLE_SIZE, _TAKEN, _REFUSED),
    _row("conntrack-min", "conntrack.min", _SAME, _TABLE_SIZE),
    _row("conntrack-tcp-timeout-established", "conntrack.tcpEstablishedTimeout", _SAME, _KERNEL),
    _row("conntrack-tcp-timeout-close-wait", "conntrack.tcpCloseWaitTimeout", _SAME, _KERNEL),
    _row("conntrack-tcp-be-liberal", "conntrack.tcpBeLiberal", _SAME, _KERNEL),
    _row("conntrack-udp-timeout", "conntrack.udpTimeout", _SAME, _KERNEL),
    _row("conntrack-udp-timeout-stream", "conntrack.udpStreamTimeout", _SAME, _KERNEL),
    _row("config-sync-period", "configSyncPeriod", _SAME, _PERIODS, *_VALUES),
    _row("v", "logging.verbosity", _SAME, f"{_AGENT}sync_log.py::test_verbosity_2_logs_no_endpoints"),
    _row("logging-format", "logging.format", _SAME, f"{_SYSTEM}run_settings.py::test_json_log_lines"),
    _row("log-flush-frequency", "logging.flushFrequency", _SAME, _TAKEN, _REFUSED_FLAG),
    _row("vmodule", "logging.vmodule", _SAME, _TAKEN, _TAKEN_FLAG, _REFUSED_FLAG),
    _row("log-text-split-stream", "logging.options.text.splitStream", _SAME),
    _row("log-text-info-buffer-size", "logging.options.text.infoBufferSize", _SAME),
    _row("log-json-split-stream", "logging.options.json.splitStream", _SAME),
    _row("log-json-info-buffer-size", "logging.options.json.infoBufferSize", _SAME),
    _row("feature-gates", "featureGates", _SAME, _RULES, *_VALUES, _GATED),
    _row("ipvs-sync-period", "", _FLAGZ),
    _row("ipvs-min-sync-period", "", _FLAGZ),
    _row("", "ipvs.syncPeriod", _CONFIGZ),
    _row("", "ipvs.minSyncPeriod", _CONFIGZ),
    _row("ipvs-scheduler", "ipvs.scheduler", _SAME),
    _row("ipvs-exclude-cidrs", "ipvs.excludeCIDRs", _SAME, _TAKEN, _TAKEN_FLAG, _OTHER_MODE),
    _row("ipvs-strict-arp", "ipvs.strictARP", _SAME),
    _row("ipvs-tcp-timeout", "ipvs.tcpTimeout", _SAME),
    _row("ipvs-tcpfin-timeout", "ipvs.tcpFinTimeout", _SAME),
    _row("ipvs-udp-timeout", "ipvs.udpTimeout", _SAME),
    *(
        _row("", f"nftables.{name}", _CONFIGZ)
        for name in ("masqueradeBit", "masqueradeAll", "syncPeriod", "minSyncPeriod")
    ),
    *(
        _row("", f"winkernel.{name}", _CONFIGZ)
        for name in ("networkName", "sourceVip", "enableDSR", "rootHnsEndpointName", "forwardHealthCheckVip")
    ),
    _row("", "portRange", _NO_EFFECT),
    _row("", "windowsRunAsService", _NO_EFFECT),
    _row("boot-id-file", "", _FLAGZ),
    _row("machine-id-file", "", _FLAGZ),
    _row("help", "", "unit/cli/test_flags_options.py::test_help_lists_effective_flags"),
    _row("version", "", f"{_SYSTEM}run_actions.py::test_version_prints_one_line"),
    _row("init-only", "", f"{_SYSTEM}run_actions.py::test_init_only_applies_kernel_settings"),
    _row(
        "cleanup",
        "",
        f"{_SYSTEM}run_actions.py::test_cleanup_removes_only_our_rules",
        f"{_SYSTEM}run_actions.py::test_cleanup_removes_what_other_modes_left",
        "kernel/test_cleanup.py::test_cleanup_removes_our_rules_in_both_backends",
        "kernel/test_cleanup.py::test_the_kubelets_firewall_chain_stays",
        "kernel/test_cleanup.py::test_a_proxys_firewall_chain_in_the_other_backend_goes",
        "kernel/test_cleanup_modes.py::test_everything_of_both_modes_is_removed",
        "kernel/test_ipvs.py::test_only_virtual_servers_of_kube_proxy_are_removed",
    ),
    _row("write-config-to", "", f"{_SYSTEM}run_actions.py::test_a_written_configuration_loads_again"),
    # Not in kube-proxy.
    _row(
        "dispatch",
        "pykubeproxy.dispatch",
        _SAME,
        f"{_SYSTEM}run_settings.py::test_dispatch_setting_selects_flat_or_tree",
    ),
    _row(
        "iptables-backend",
        "pykubeproxy.iptablesBackend",
        _SAME,
        f"{_SYSTEM}run_settings.py::test_rules_are_in_the_configured_backend_only",
    ),
    _row(
        "max-affinity-lists",
        "pykubeproxy.maxAffinityLists",
        _SAME,
        "unit/services/test_affinity.py::test_a_service_above_the_bound_is_served_without_affinity",
    ),
    _row(
        "max-service-pairs",
        "pykubeproxy.maxServicePairs",
        _SAME,
        "unit/agent/test_large_services.py::test_an_oversized_service_is_quarantined_with_both_numbers",
    ),
)

_SYNCS = f"{_AGENT}metrics.py::test_syncs_are_measured"
_BUCKETS = f"{_AGENT}metrics.py::test_buckets_equal_kube_proxys"
_CHANGES = f"{_AGENT}metrics.py::test_changes_are_pending_until_synced"
_COUNTS = f"{_AGENT}change_counts.py::test_events_count_as_in_kube_proxy"
_BY_FAMILY = f"{_AGENT}loop.py::test_only_families_with_changes_are_synced"
_PENDING = f"{_AGENT}observers.py::test_changes_are_pending_until_all_families_are_synced"
_FAILURES = f"{_AGENT}metrics.py::test_failure_counters_appear_with_the_first_failure"
_FLOWS = f"{_AGENT}metrics.py::test_conntrack_and_latency"
_LOCAL = f"{_AGENT}metrics.py::test_services_without_local_endpoints_are_counted"
_PACKETS = f"{_AGENT}metrics.py::test_packet_counters_are_read_at_each_scrape"
_SCRAPED = f"{_AGENT}observers.py::test_an_agent_is_healthy_after_all_families_are_synced"
# A running agent, in which each of these has a value.
_RUNNING = f"{_SYSTEM}agent_observed.py::test_a_running_agent_has_all_recorded_metrics"
_UDP = f"{_SYSTEM}agent_udp.py::test_clients_reach_a_replacement_pod_within_one_sync"

# By name without the prefix kubeproxy_.
METRICS = {
    "sync_proxy_rules_duration_seconds": (_SYNCS, _BUCKETS, _BY_FAMILY, _RUNNING),
    "sync_full_proxy_rules_duration_seconds": (_SYNCS, _BUCKETS, _RUNNING),
    "sync_partial_proxy_rules_duration_seconds": (_SYNCS, _BUCKETS, _RUNNING),
    "conntrack_reconciler_sync_duration_seconds": (_FLOWS, _BUCKETS, _UDP),
    "conntrack_reconciler_deleted_entries_total": (_FLOWS, _UDP),
    "network_programming_duration_seconds": (
        _FLOWS,
        _BUCKETS,
        _RUNNING,
        f"{_AGENT}observers.py::test_latency_is_measured_from_trigger_to_sync",
    ),
    "sync_proxy_rules_last_timestamp_seconds": (_SYNCS, _RUNNING),
    "sync_proxy_rules_last_queued_timestamp_seconds": (_SYNCS, _BY_FAMILY, _RUNNING),
    "sync_proxy_rules_endpoint_changes_pending": (
        _CHANGES,
        _PENDING,
        f"{_AGENT}change_counts.py::test_changes_of_slices_wait_one_by_one",
    ),
    "sync_proxy_rules_service_changes_pending": (
        _CHANGES,
        _PENDING,
        f"{_SYSTEM}agent_under_stress.py::test_pages_are_served_during_a_sync",
    ),
    "sync_proxy_rules_endpoint_changes_total": (_COUNTS, _CHANGES, _RUNNING),
    "sync_proxy_rules_service_changes_total": (_COUNTS, _CHANGES, _RUNNING),
    "sync_proxy_rules_iptables_restore_failures_total": (
        _FAILURES,
        f"{_AGENT}observers.py::test_repeated_sync_failures_are_unhealthy",
    ),
    "sync_proxy_rules_iptables_partial_restore_failures_total": (_FAILURES,),
    "sync_proxy_rules_iptables_total": (
        _SYNCS,
        _RUNNING,
        f"{_AGENT}family_tables.py::test_rules_are_counted_as_in_kube_proxy",
    ),
    "sync_proxy_rules_iptables_last": (_SYNCS, _RUNNING),
    "sync_proxy_rules_no_local_endpoints_total": (_LOCAL, _RUNNING),
    "proxy_healthz_total": (_SCRAPED, f"{_AGENT}health.py::test_responses_are_counted"),
    "proxy_livez_total": (_SCRAPED, f"{_AGENT}health.py::test_responses_are_counted"),
    "iptables_ct_state_invalid_dropped_packets_total": (_PACKETS, _RUNNING),
    "iptables_localhost_nodeports_accepted_packets_total": (_PACKETS, _RUNNING),
}

_HEALTH = f"{_AGENT}health.py::test_responses_equal_kube_proxys"
_PAGES = f"{_AGENT}pages.py::test_responses_equal_kube_proxys"
_IN_SERVICE = f"{_SYSTEM}agent_observed.py::test_health_and_metrics_of_a_node_in_service"

# What kube-proxy does with objects and nodes, in words.
BEHAVIOUR = {
    "an invalid address of a Node costs only itself": (
        "unit/objects/test_bad_input.py::test_an_invalid_node_address_costs_only_itself",
        "unit/sources/test_tracker.py::test_an_invalid_node_address_is_logged_once",
        f"{_SYSTEM}agent_node.py::test_an_invalid_node_address_costs_only_itself",
    ),
    "an invalid entry of a Service or an EndpointSlice costs only itself": (
        "unit/objects/test_bad_input.py::test_an_invalid_entry_costs_only_itself",
        "unit/objects/test_bad_input.py::test_an_invalid_ingress_address_costs_only_itself",
        "unit/objects/test_bad_input.py::test_an_invalid_endpoint_or_port_costs_only_itself",
        "unit/inspect/test_skipped_values.py::test_an_invalid_endpoint_address_is_skipped",
    ),
    "a source range list with nothing valid left lets nobody in (kube-proxy: everybody)": (
        "unit/services/test_kube_proxy_selection.py::test_an_invalid_source_range_admits_nobody",
        "unit/rules/test_packets.py::test_every_packet_reaches_its_endpoints_with_equal_shares",
        "unit/inspect/test_skipped_values.py::test_a_load_balancer_without_a_valid_source_range_is_open_to_nobody",
    ),
    "a deleted Node is served with its last state": (
        f"{_AGENT}loop.py::test_a_deleted_node_keeps_rules_and_health",
        f"{_AGENT}loop.py::test_a_node_created_again_in_node_cidr_mode_is_served_on",
        f"{_SYSTEM}agent_node.py::test_a_deleted_node_is_served_on_and_stays_healthy",
    ),
    "addresses of the Node are followed (kube-proxy: those at its start)": (
        f"{_SYSTEM}agent_node.py::test_node_ports_follow_the_node_address",
        f"{_SYSTEM}agent_node.py::test_source_ranges_follow_the_node_address",
        f"{_SYSTEM}agent_node.py::test_a_node_whose_address_changes_its_family_is_served_on",
        f"{_AGENT}healthchecks.py::test_primary_means_all_addresses_in_a_family_in_which_the_node_has_none",
    ),
    "a signal ends the agent with status 0 (kube-proxy: 143, or 2 as first process), wrong usage with 2 (1)": (
        _IN_SERVICE,
        f"{_SYSTEM}agent_observed.py::test_sigterm_ends_the_first_process_of_a_container",
        "unit/cli/test_run_end.py::test_wrong_usage_has_a_status_of_its_own",
    ),
    "ServiceCIDRs are not watched; all else is requested as by kube-proxy": (
        f"{_SYSTEM}sources_watch.py::test_the_same_objects_are_requested_as_by_kube_proxy",
        f"{_SYSTEM}sources_watch.py::test_requests_are_those_of_a_good_client",
    ),
    "a family that the node lacks is left out": (
        f"{_SYSTEM}agent_single_stack.py::test_only_ipv4_is_served",
        "kernel/test_features.py::test_ipv6_disabled_by_sysctl",
        "kernel/test_features.py::test_kernel_without_ipv6",
        "kernel/test_tools.py::test_commands_of_one_family_suffice",
        "kernel/test_check.py::test_a_node_without_ipv6_passes_unless_the_cluster_uses_it",
    ),
    "without the primary family, or networks of it, the start fails": (
        f"{_SYSTEM}agent_single_stack.py::test_an_ipv6_cluster_cidr_fails_the_start_without_ipv6",
        f"{_SYSTEM}agent_single_stack.py::test_a_node_with_ipv6_addresses_only_fails_the_start_without_ipv6",
        "unit/rules/test_context.py::test_a_cluster_cidr_of_the_other_family_needs_both_families",
        "unit/rules/test_context.py::test_pod_cidrs_of_the_other_family_are_refused",
    ),
    "lists are compressed with gzip, unless the kubeconfig disables it": (
        f"{_SYSTEM}sources_compression.py::test_lists_are_compressed_and_watches_are_not",
        f"{_SYSTEM}sources_compression.py::test_kubeconfig_can_disable_compression",
        f"{_SYSTEM}sources_compression.py::test_an_incomplete_compressed_list_is_retried",
    ),
    "an object that is too large is skipped, and a list has an end (kube-proxy: no limits)": (
        f"{_SYSTEM}sources_compression.py::test_an_object_that_is_too_large_costs_only_itself",
        f"{_SYSTEM}sources_compression.py::test_a_bomb_is_a_failure",
        f"{_SYSTEM}faults_responses.py::test_endless_empty_pages_are_a_failure",
        "unit/sources/test_wire.py::test_endless_list_is_a_failure",
        "unit/sources/test_tracker.py::test_commas_count_outside_of_strings_only",
    ),
    "/readyz is 503 while a list fails (kube-proxy: none of its pages shows that)": (
        f"{_AGENT}health.py::test_failing_lists_are_not_ready_but_healthy",
    ),
    "changes of one object during a sync count as one (kube-proxy: each)": (
        f"{_AGENT}mailbox.py::test_the_latest_event_of_each_object_is_kept",
        f"{_AGENT}mailbox.py::test_the_oldest_trigger_time_is_kept",
    ),
    "an optional name that is too long is ignored (kube-proxy: kept)": (
        "unit/objects/test_bad_input.py::test_an_endpoint_with_an_impossible_optional_name_is_served",
    ),
    "a health check port answers in both families (kube-proxy: in those of the Service)": (
        f"{_AGENT}observers.py::test_the_health_check_port_of_an_ipv4_service_answers_on_ipv6_too",
        _IN_SERVICE,
    ),
}

# By port and path, as in the recording.
ENDPOINTS = {
    ":10256/healthz": (
        _HEALTH,
        _IN_SERVICE,
        f"{_AGENT}health.py::test_any_method_is_a_health_check",
        f"{_AGENT}health.py::test_an_unclean_path_is_redirected",
        f"{_SYSTEM}agent_node.py::test_a_tainted_node_keeps_its_rules",
    ),
    ":10256/livez": (_HEALTH, _IN_SERVICE, f"{_AGENT}health.py::test_only_healthz_depends_on_the_node"),
    ":10256/readyz": (
        f"{_AGENT}health.py::test_before_the_first_sync_a_node_is_alive_but_not_ready",
        f"{_SYSTEM}agent_observed.py::test_a_node_without_rules_is_not_ready",
    ),
    ":10249/healthz": (_PAGES, f"{_AGENT}pages.py::test_all_methods_get_the_same_page"),
    ":10249/healthz/ping": (f"{_AGENT}pages.py::test_ping_is_answered",),
    ":10249/metrics/slis": (
        f"{_AGENT}pages.py::test_slis_count_health_checks",
        f"{_AGENT}pages.py::test_metrics_are_compressed_on_demand",
    ),
    ":10249/proxyMode": (_PAGES, _IN_SERVICE),
    ":10249/configz": (_PAGES, _AS_GIVEN),
    ":10249/flagz": (
        _GATED,
        _AS_GIVEN,
        f"{_AGENT}pages.py::test_flagz_has_kube_proxys_flags_and_ours",
        f"{_AGENT}pages.py::test_flagz_is_an_api_object_on_demand",
        f"{_AGENT}pages.py::test_flagz_accepts_what_kube_proxys_accepts",
    ),
    ":10249/statusz": (
        _GATED,
        f"{_AGENT}pages.py::test_statusz_equals_kube_proxys_except_versions",
        f"{_AGENT}pages.py::test_statusz_is_an_api_object_on_demand",
    ),
    ":10249/metrics": (
        f"{_AGENT}metrics.py::test_names_types_and_labels_equal_kube_proxys",
        f"{_AGENT}metrics.py::test_metrics_of_libraries_are_served_or_listed_as_missing",
        f"{_AGENT}pages.py::test_metrics_are_compressed_on_demand",
        _IN_SERVICE,
    ),
    ":32000/": (f"{_AGENT}healthchecks.py::test_responses_equal_kube_proxys", _IN_SERVICE),
}

_EVENTS = f"{_AGENT}events.py::test_events_equal_kube_proxys"

# By the event's reason.
EVENTS = {
    "Starting": (_EVENTS, f"{_AGENT}events.py::test_event_objects_are_valid", _IN_SERVICE),
    "FailedToStartServiceHealthcheck": (
        _EVENTS,
        f"{_AGENT}events.py::test_failures_are_warnings",
        f"{_SYSTEM}agent_observed.py::test_a_health_check_port_in_use_causes_an_event",
    ),
    "FailedToStartProxierHealthcheck": (f"{_AGENT}events.py::test_failures_are_warnings", _HARD_FAIL),
    "FailedToStartMetricServer": (f"{_AGENT}events.py::test_failures_are_warnings", _HARD_FAIL),
    # Not in kube-proxy.
    "DriftRepaired": (
        f"{_AGENT}events.py::test_failures_are_warnings",
        f"{_SYSTEM}agent_drift.py::test_repairs_are_reported",
    ),
    "DriftContested": (
        f"{_AGENT}events.py::test_failures_are_warnings",
        f"{_SYSTEM}agent_drift.py::test_contested_repairs_back_off",
    ),
    "DriftCalm": (
        f"{_AGENT}events.py::test_the_end_of_contention_is_normal",
        f"{_SYSTEM}agent_drift.py::test_contested_repairs_back_off",
    ),
    "ServiceQuarantined": (f"{_AGENT}events.py::test_failures_are_warnings",),
    "ObjectSkipped": (f"{_AGENT}observers.py::test_an_object_that_is_too_large_is_an_event",),
}
