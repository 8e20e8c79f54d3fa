//! The controller's HTTP API and its OpenAPI document, made from the same handlers.

pub mod backups;
mod balance;
pub mod caller;
mod callers;
pub mod catalog;
pub mod cookie;
pub mod doors;
mod enrol;
pub mod hosts;
pub mod jobs;
mod metrics;
mod networks;
mod once;
pub mod prices;
pub mod rentals;
pub mod renting;
pub mod tasks;
pub mod tenants;
mod upgrade;
pub mod vms;

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::middleware::from_fn_with_state;
use perigee_http::{Failure, Json};
use perigee_model::Problem;
use perigee_model::ids::{FULL_PATTERN, WORD_PATTERN};
use perigee_model::limits::REQUEST_KEY_BYTES;
use utoipa::OpenApi;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::Type;
use utoipa::openapi::{
    ContentBuilder, ObjectBuilder, Ref, RefOr, Required, ResponseBuilder, Schema,
};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::cluster::Cluster;
use crate::records::asked;
pub use caller::Caller;
#[cfg(test)]
pub use callers::TABLE;
pub(crate) use callers::note_unknown;
pub use callers::{Sender, admit, may, notice};
#[cfg(test)]
pub use metrics::page as metrics_page;

type Shared = State<Arc<Cluster>>;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Perigee controller",
        description = "Hosts, tenants, images, volumes, VMs and jobs of one cluster. A short name is one of the own tenant; answers have full names, TENANT~NAME. Every error is a Problem.",
        license(name = "Apache-2.0")
    ),
    components(schemas(Problem))
)]
struct Document;

type Routes = OpenApiRouter<Arc<Cluster>>;

fn routes() -> Routes {
    let v1 = cluster_routes()
        .merge(catalog_routes())
        .merge(vm_routes())
        .merge(job_routes())
        .merge(tenant_routes());
    let mut router = OpenApiRouter::with_openapi(Document::openapi()).nest("/v1", v1);
    complete(router.get_openapi_mut());
    router
}

/// Hosts with their certificates, figures and links, and the controller's tasks.
fn cluster_routes() -> Routes {
    OpenApiRouter::new()
        .routes(routes!(hosts::register, hosts::info, hosts::remove))
        .routes(routes!(hosts::set_site))
        .routes(routes!(hosts::give_up))
        .routes(routes!(hosts::drain))
        .routes(routes!(hosts::undrain))
        .routes(routes!(hosts::measured, hosts::measure, hosts::cancel_measurement))
        .routes(routes!(balance::balance))
        .routes(routes!(balance::set_balance))
        .routes(routes!(hosts::set_place))
        .routes(routes!(hosts::stops))
        .routes(routes!(hosts::shuts_down))
        .routes(routes!(hosts::list))
        .routes(routes!(enrol::token))
        .routes(routes!(enrol::enrol))
        .routes(routes!(enrol::check_token))
        .routes(routes!(enrol::check))
        .routes(routes!(enrol::renew))
        .routes(routes!(enrol::revoke_host))
        .routes(routes!(enrol::revoke_operators))
        .routes(routes!(enrol::revoked))
        .routes(routes!(tasks::list))
        .routes(routes!(upgrade::upgrade_status))
        .routes(routes!(upgrade::finish_upgrade))
        .routes(routes!(prices::prices))
        .routes(routes!(hosts::sites))
        .routes(routes!(hosts::links))
        .routes(routes!(hosts::probe_links))
        .routes(routes!(rentals::offers))
        .routes(routes!(rentals::list, rentals::rent))
        .routes(routes!(rentals::info))
        .routes(routes!(rentals::end))
        .routes(routes!(rentals::kept_disks))
        .routes(routes!(renting::show, renting::set))
        .routes(routes!(metrics::of_host))
        .routes(routes!(metrics::targets))
}

/// Images and volumes.
fn catalog_routes() -> Routes {
    OpenApiRouter::new()
        .routes(routes!(catalog::upload_image))
        .routes(routes!(catalog::images, catalog::import_image))
        .routes(routes!(catalog::image, catalog::delete_image))
        .routes(routes!(catalog::volumes, catalog::create_volume))
        .routes(routes!(catalog::volume, catalog::delete_volume))
        .routes(routes!(catalog::adopt_volume))
        .routes(routes!(catalog::unknown))
        .routes(routes!(catalog::adopt_image))
        .routes(routes!(catalog::snapshot))
        .routes(routes!(catalog::set_volume_leave_site))
        .routes(routes!(catalog::set_image_leave_site))
        .routes(routes!(catalog::share_image))
        .routes(routes!(catalog::replicate_image))
        .routes(routes!(catalog::move_volume, catalog::last_move))
        .routes(routes!(catalog::cancel_volume_move))
        .routes(routes!(catalog::replicate_volume))
        .routes(routes!(catalog::stop_replica))
        .routes(routes!(catalog::promote_volume))
        .routes(routes!(backups::list, backups::create))
        .routes(routes!(backups::info, backups::delete))
        .routes(routes!(backups::verify))
        .routes(routes!(backups::restore))
        .routes(routes!(backups::restore_vm))
        .routes(routes!(backups::restore_image))
        .routes(routes!(backups::look))
        .routes(routes!(backups::list_schedules, backups::set_schedule))
        .routes(routes!(backups::end_schedule))
}

/// Networks and VMs.
fn vm_routes() -> Routes {
    OpenApiRouter::new()
        .routes(routes!(vms::end_unknown))
        .routes(routes!(vms::adopt))
        .routes(routes!(networks::list, networks::create))
        .routes(routes!(networks::info, networks::delete))
        .routes(routes!(vms::list, vms::create))
        .routes(routes!(vms::info, vms::delete))
        .routes(routes!(vms::start))
        .routes(routes!(vms::restart))
        .routes(routes!(vms::stop))
        .routes(routes!(vms::move_vm))
        .routes(routes!(vms::cancel_move))
        .routes(routes!(vms::migrations))
        .routes(routes!(balance::of_vm))
        .routes(routes!(vms::console))
        .routes(routes!(vms::attach_console))
        .routes(routes!(vms::view_screen))
        .routes(routes!(vms::ssh))
        .routes(routes!(vms::exec, vms::exec_status, vms::exec_end))
        .routes(routes!(vms::snapshot))
        .routes(routes!(vms::restore))
        .routes(routes!(vms::resize))
        .routes(routes!(vms::set))
        .routes(routes!(vms::attach))
        .routes(routes!(vms::detach))
        .routes(routes!(vms::read_file, vms::write_file))
}

/// Jobs and plans.
fn job_routes() -> Routes {
    OpenApiRouter::new()
        .routes(routes!(jobs::plan))
        .routes(routes!(jobs::submit, jobs::list))
        .routes(routes!(jobs::info, jobs::delete))
        .routes(routes!(jobs::cancel))
        .routes(routes!(jobs::move_job))
        .routes(routes!(jobs::cancel_move))
        .routes(routes!(jobs::log))
        .routes(routes!(jobs::decisions))
        .routes(routes!(jobs::score))
        .routes(routes!(jobs::samples))
        .routes(routes!(jobs::left_out))
        .routes(routes!(jobs::output))
}

/// Tenants and their users.
fn tenant_routes() -> Routes {
    OpenApiRouter::new()
        .routes(routes!(tenants::me))
        .routes(routes!(tenants::audit))
        .routes(routes!(tenants::list, tenants::create))
        .routes(routes!(tenants::info, tenants::delete))
        .routes(routes!(tenants::set_quota))
        .routes(routes!(tenants::set_backup_targets))
        .routes(routes!(tenants::backup_key, tenants::set_backup_key))
        .routes(routes!(tenants::users))
        .routes(routes!(tenants::user, tenants::put_user, tenants::remove_user))
        .routes(routes!(tenants::tokens, tenants::make_token))
        .routes(routes!(tenants::revoke_token))
        .routes(routes!(tenants::put_key))
        .routes(routes!(tenants::remove_key))
}

/// The pattern of a name in a path; `None` for what is no name.
fn pattern_of(parameter: &str) -> Option<&'static str> {
    match parameter {
        "host" | "rental" | "site" | "tenant" | "user" => Some(WORD_PATTERN),
        "backup" | "image" | "job" | "network" | "schedule" | "vm" | "volume" => Some(FULL_PATTERN),
        _ => None,
    }
}

/// Says which names a path takes.
fn limit_names(parameters: &mut [RefOr<Parameter>]) {
    for parameter in parameters {
        if let RefOr::T(parameter) = parameter
            && matches!(parameter.parameter_in, ParameterIn::Path)
            && let Some(RefOr::T(Schema::Object(name))) = &mut parameter.schema
            && let Some(pattern) = pattern_of(&parameter.name)
        {
            name.pattern = Some(pattern.to_owned());
        }
    }
}

/// The header by which a request makes its thing once.
fn request_key() -> Parameter {
    let text = ObjectBuilder::new()
        .schema_type(Type::String)
        .min_length(usize::try_from(REQUEST_KEY_BYTES.min).ok())
        .max_length(usize::try_from(REQUEST_KEY_BYTES.max).ok());
    ParameterBuilder::new()
        .name(once::HEADER)
        .parameter_in(ParameterIn::Header)
        .required(Required::False)
        .description(Some(
            "A new text for each thing that is to be made, such as a UUID. The request can then be repeated when its answer is lost: for 24 \
             hours the same key with the same request is answered with what the first one has made. 409 with Retry-After: the first one is \
             still being carried out. 422: the key was used for another request.",
        ))
        .schema(Some(text.build()))
        .build()
}

/// What the macros leave out, and OpenAPI asks for: each operation has an id of its own, and each answer a description. Each may be a
/// [`Problem`]. A name in a path has its pattern.
fn complete(document: &mut utoipa::openapi::OpenApi) {
    let problem = Ref::from_schema_name("Problem");
    let content = ContentBuilder::new().schema(Some(problem)).build();
    let failure = ResponseBuilder::new()
        .description("What failed, why, and what to do next")
        .content("application/json", content)
        .build();
    for (path, item) in &mut document.paths.paths {
        if let Some(creates) = item.post.as_mut().filter(|_| once::ROUTES.contains(&path.as_str()))
        {
            creates.parameters.get_or_insert_default().push(RefOr::T(request_key()));
        }
        let operations = [&mut item.get, &mut item.put, &mut item.post, &mut item.delete];
        for operation in operations.into_iter().flatten() {
            let tag = operation.tags.iter().flatten().next();
            if let (Some(tag), Some(id)) = (tag, &operation.operation_id) {
                operation.operation_id = Some(format!("{tag}_{id}"));
            }
            limit_names(operation.parameters.as_deref_mut().unwrap_or_default());
            let responses = &mut operation.responses.responses;
            for answer in responses.values_mut() {
                if let RefOr::T(answer) = answer
                    && answer.description.is_empty()
                {
                    answer.description = "What was asked for".to_owned();
                }
            }
            responses.insert("default".to_owned(), RefOr::T(failure.clone()));
        }
    }
}

/// All that the controller serves: the routes below `/v1`, their OpenAPI document, `/metrics` and the doors for files.
/// Each request goes through [`callers::admit`] first, and one with a key through [`once::once`].
pub fn router(cluster: Arc<Cluster>) -> Router {
    let (router, document) = routes().split_for_parts();
    let router = router
        .route("/v1/openapi.json", axum::routing::get(move || async { axum::Json(document) }))
        .route("/metrics", axum::routing::get(metrics::metrics))
        .fallback(nothing_here)
        .with_state(Arc::clone(&cluster))
        .merge(doors::router(&cluster));
    router
        .layer(from_fn_with_state(Arc::clone(&cluster), once::once))
        .layer(from_fn_with_state(cluster, admit))
}

async fn nothing_here(request: axum::extract::Request) -> Failure {
    let what = format!("{} {}", request.method(), request.uri().path());
    Problem::not_found(what, "the API has no such path").next("see /v1/openapi.json").into()
}

/// A path parameter that is no tenant's ([`caller::Full`] is for the others). If it is not a valid name, the answer is a
/// [`Problem`].
pub struct Name<T>(pub T);

impl<T, S> axum::extract::FromRequestParts<S> for Name<T>
where
    T: std::str::FromStr,
    T::Err: std::fmt::Display,
    S: Send + Sync,
{
    type Rejection = Failure;

    async fn from_request_parts(
        parts: &mut axum::http::request::Parts,
        state: &S,
    ) -> Result<Self, Failure> {
        let text = axum::extract::Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|e| Failure(Problem::invalid("request path", e.body_text())))?;
        text.0.parse().map(Self).map_err(|e: T::Err| Failure(Problem::invalid("request path", e)))
    }
}

/// The API's document.
#[cfg(test)]
pub fn document() -> serde_json::Value {
    serde_json::to_value(routes().split_for_parts().1).expect("JSON")
}

/// Every method and path of the API's document.
#[cfg(test)]
pub fn operations() -> Vec<(String, String)> {
    let document = document();
    let paths = document["paths"].as_object().expect("paths").clone();
    let methods = |item: &serde_json::Value| -> Vec<String> {
        let known = ["get", "put", "post", "delete"].map(str::to_owned);
        known.into_iter().filter(|method| item.get(method).is_some()).collect()
    };
    let all = paths.iter().flat_map(|(path, item)| {
        methods(item).into_iter().map(move |method| (method, path.clone()))
    });
    all.collect()
}

/// A change of several steps goes on when the client that has asked for it disconnects.
async fn to_its_end<T: Send + 'static>(
    change: impl Future<Output = Result<T, Problem>> + Send + 'static,
) -> Result<T, Problem> {
    tokio::spawn(asked::carried(change))
        .await
        .map_err(|e| Problem::internal("can't do what was asked for", e))?
}

fn json<T>(value: T) -> Result<Json<T>, Failure> {
    Ok(Json(value))
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_operation_of_the_openapi_document_has_its_own_id_and_each_answer_a_description() {
        let document = super::document();
        let mut ids = std::collections::BTreeSet::new();
        for (method, path) in super::operations() {
            let operation = &document["paths"][&path][&method];
            let id = operation["operationId"].as_str().expect("an id");
            assert!(ids.insert(id.to_owned()), "{id} is there twice");
            for (status, answer) in operation["responses"].as_object().expect("answers") {
                let text = answer["description"].as_str().unwrap_or_default();
                assert!(!text.is_empty(), "{method} {path}: {status} has no description");
            }
        }
    }

    #[test]
    fn each_name_in_a_path_has_its_pattern() {
        let document = super::document();
        for (method, path) in super::operations() {
            let operation = &document["paths"][&path][&method];
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            for parameter in parameters.filter(|one| one["in"] == "path") {
                let is_secret = ["key", "token"].iter().any(|name| parameter["name"] == *name);
                let schema = &parameter["schema"];
                assert!(is_secret || schema["pattern"].is_string(), "{method} {path}: {schema}");
            }
        }
    }

    /// Names in bodies had none, so that the document allowed what the controller refuses.
    #[test]
    fn each_type_of_a_name_has_its_pattern() {
        let document = super::document();
        let words = ["GroupName", "HostId", "RentalId", "SiteId", "TenantName", "UserName"];
        let full = ["ImageName", "JobId", "MigrationId", "NetworkName", "VmId", "VolumeName"];
        let expected = words.map(|name| (name, super::WORD_PATTERN)).into_iter();
        for (name, pattern) in expected.chain(full.map(|name| (name, super::FULL_PATTERN))) {
            let schema = &document["components"]["schemas"][name];
            assert_eq!(schema["pattern"], pattern, "{name}: {schema}");
        }
    }

    /// A body with more in it was taken, and what was more in it did nothing.
    #[test]
    fn the_end_of_a_rental_takes_what_its_schema_allows_and_nothing_else() {
        use perigee_model::rental::EndRental;
        let schema = &super::document()["components"]["schemas"]["EndRental"];
        assert_eq!(schema["additionalProperties"], false, "{schema}");
        let read = |text: &str| serde_json::from_str::<EndRental>(text).map(|ask| ask.now);
        assert!(read(r#"{"now": true}"#).expect("it is allowed"));
        assert!(read(r#"{"now": true, "soon": 1}"#).is_err());
    }

    #[test]
    fn openapi_document_is_that_of_the_code() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");
        let fresh = super::routes().split_for_parts().1.to_pretty_json().expect("JSON") + "\n";
        if std::env::var_os("UPDATE_OPENAPI").is_some() {
            std::fs::write(path, &fresh).expect("write openapi.json");
        }
        let checked_in = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            fresh == checked_in,
            "crates/controller/openapi.json is stale; make it anew with\n  \
             UPDATE_OPENAPI=1 cargo test -p perigee-controller openapi"
        );
    }
}
